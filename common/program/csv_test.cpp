// SPDX-License-Identifier: MIT
#include "common/program/csv.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "common/program/options.h"
#include "common/program/text.h"

namespace fs = std::filesystem;

namespace {

/// A folder of its own, removed at the end.
struct Folder {
  fs::path path = fs::temp_directory_path() / ("csv_test." + std::to_string(getpid()));

  Folder() { fs::create_directories(path); }
  Folder(const Folder &) = delete;
  Folder &operator=(const Folder &) = delete;
  ~Folder() { fs::remove_all(path); }

  std::string operator/(const std::string &name) const { return (path / name).string(); }
};

void write(const std::string &path, const std::string &text) {
  std::ofstream(path) << text;
}

const std::string kHeader = "step,device,ms";

/// The message of the UsageError that opening the file throws, or "".
std::string error_on_opening(const std::string &path) {
  try {
    CsvFile("--csv", path, kHeader);
  } catch (const UsageError &error) {
    return error.what();
  }
  return "";
}

/// For a while nobody in particular: root may write everywhere.
struct WithoutPrivileges {
  const bool was_root = getuid() == 0;
  const bool dropped = was_root && setresuid(65534, 65534, 0) == 0;

  ~WithoutPrivileges() {
    if (dropped && setresuid(0, 0, 0) != 0) std::abort();
  }
  explicit operator bool() const { return !was_root || dropped; }
};

}  // namespace

TEST_CASE("csv: a new file gets the header, then the rows") {
  const Folder folder;
  CsvFile("--csv", folder / "new.csv", kHeader).append({"02,gpu,1.5", "03,gpu,1.25"});
  CHECK(read_text(folder / "new.csv") == "step,device,ms\n02,gpu,1.5\n03,gpu,1.25\n");
}

TEST_CASE("csv: rows are appended under one header") {
  const Folder folder;
  const CsvFile file("--csv", folder / "a.csv", kHeader);
  file.append({"1,a,1"});
  file.append({"2,b,2", "3,c,3"});
  CsvFile("--csv", folder / "a.csv", kHeader).append({"4,d,4"});
  CHECK(read_text(folder / "a.csv") == "step,device,ms\n1,a,1\n2,b,2\n3,c,3\n4,d,4\n");
}

TEST_CASE("csv: an empty file gets the header") {
  const Folder folder;
  write(folder / "empty.csv", "");
  CsvFile("--csv", folder / "empty.csv", kHeader).append({"1,a,1"});
  CHECK(read_text(folder / "empty.csv") == "step,device,ms\n1,a,1\n");
}

TEST_CASE("csv: a file in the working directory needs no folder in its name") {
  const Folder folder;
  {
    const struct Inside {
      const fs::path before = fs::current_path();
      explicit Inside(const fs::path &path) { fs::current_path(path); }
      ~Inside() { fs::current_path(before); }
    } inside(folder.path);
    CsvFile("--csv", "here.csv", kHeader).append({"1,a,1"});
  }
  CHECK(read_text(folder / "here.csv") == "step,device,ms\n1,a,1\n");
}

TEST_CASE("csv: opening a file writes nothing") {
  const Folder folder;
  const CsvFile file("--csv", folder / "new.csv", kHeader);
  CHECK(!fs::exists(folder / "new.csv"));
  write(folder / "empty.csv", "");
  const CsvFile empty("--csv", folder / "empty.csv", kHeader);
  CHECK(read_text(folder / "empty.csv") == "");
}

TEST_CASE("csv: a file with another header is refused and left alone") {
  const Folder folder;
  const std::string path = folder / "other.csv";
  for (const std::string text :
       {"step,device\n1,a\n", "step,device,ms,more\n1,a,1,2\n", "Step,device,ms\n1,a,1\n",
        "1,a,1\nstep,device,ms\n", "\nstep,device,ms\n"}) {
    CAPTURE(text);
    write(path, text);
    CHECK(error_on_opening(path) ==
          "--csv " + path +
              ": has another header; must be a new file, or one that begins "
              "with 'step,device,ms'");
    CHECK(read_text(path) == text);
  }
}

TEST_CASE("csv: a row begins on a line of its own, even if the file's last line has no end") {
  const Folder folder;
  write(folder / "a.csv", "step,device,ms\n1,a,1");
  CsvFile("--csv", folder / "a.csv", kHeader).append({"2,b,2"});
  CHECK(read_text(folder / "a.csv") == "step,device,ms\n1,a,1\n2,b,2\n");
  write(folder / "b.csv", "step,device,ms");
  CsvFile("--csv", folder / "b.csv", kHeader).append({"1,a,1"});
  CHECK(read_text(folder / "b.csv") == "step,device,ms\n1,a,1\n");
}

TEST_CASE("csv: a path that cannot be written to is refused, by name") {
  const Folder folder;
  const auto refused = [](const std::string &path) {
    return "--csv " + path +
           ": cannot be written; must be a file in a folder that exists and can be written to";
  };
  const std::string nowhere = folder / "no/such/folder.csv";
  CHECK(error_on_opening(nowhere) == refused(nowhere));
  CHECK(!fs::exists(folder / "no"));

  write(folder / "file", "");
  const std::string below_a_file = folder / "file/a.csv";
  CHECK(error_on_opening(below_a_file) == refused(below_a_file));

  const std::string directory = folder / "directory.csv";
  fs::create_directory(directory);
  CHECK(error_on_opening(directory) == refused(directory));
  CHECK(error_on_opening(folder.path.string() + "/") == refused(folder.path.string() + "/"));

  CHECK(error_on_opening("/dev/full") == refused("/dev/full"));

  const std::string loop = folder / "loop.csv", dangling = folder / "dangling.csv";
  fs::create_symlink(loop, loop);
  fs::create_symlink(folder / "no/such/folder.csv", dangling);
  CHECK(error_on_opening(loop) == refused(loop));
  CHECK(error_on_opening(loop + "/a.csv") == refused(loop + "/a.csv"));
  CHECK(error_on_opening(dangling) == refused(dangling));
  const std::string too_long = folder / std::string(300, 'x');
  CHECK(error_on_opening(too_long) == refused(too_long));
}

TEST_CASE("csv: a link to a file is that file") {
  const Folder folder;
  write(folder / "a.csv", "step,device,ms\n");
  fs::create_symlink(folder / "a.csv", folder / "link.csv");
  CsvFile("--csv", folder / "link.csv", kHeader).append({"1,a,1"});
  CHECK(read_text(folder / "a.csv") == "step,device,ms\n1,a,1\n");
}

TEST_CASE("csv: one file by two names is one file, whether it exists or not") {
  const Folder folder;
  const std::string a = folder / "a.csv", b = folder / "b.csv";
  const auto check_same = [&] {
    CHECK(same_file(a, a));
    CHECK(!same_file(a, b));
    CHECK(same_file(a, folder / "./a.csv"));
    CHECK(same_file(a, folder / "none/../a.csv"));
    CHECK(same_file(a, folder.path.string() + "//a.csv"));
    CHECK(same_file("no-such-file.csv", "./no-such-file.csv"));
    CHECK(same_file("no-such-file.csv", fs::absolute("no-such-file.csv")));
  };
  check_same();
  write(a, "");
  check_same();
  fs::create_symlink(a, folder / "link.csv");
  fs::create_hard_link(a, folder / "hard.csv");
  fs::create_directory_symlink(folder.path, folder / "also");
  CHECK(same_file(a, folder / "link.csv"));
  CHECK(same_file(folder / "hard.csv", a));
  CHECK(same_file(b, folder / "also/b.csv"));
  CHECK(!same_file("", ""));
  CHECK(!same_file(a, ""));
}

TEST_CASE("csv: a folder or file without permission is refused") {
  const Folder folder;
  fs::permissions(folder.path, fs::perms(0755));
  const std::string closed = folder / "closed", locked = folder / "locked.csv";
  fs::create_directory(closed);
  fs::permissions(closed, fs::perms(0555));
  write(locked, "step,device,ms\n");
  fs::permissions(locked, fs::perms(0444));
  const std::string secret = folder / "secret.csv";
  write(secret, "step,device,ms\n");
  fs::permissions(secret, fs::perms(0222));  // its header cannot be compared
  std::string of_closed, of_locked, of_secret;
  {
    const WithoutPrivileges nobody;
    if (!nobody) {
      MESSAGE("not tested: root, and cannot become anybody else");
      return;
    }
    of_closed = error_on_opening(closed + "/a.csv");
    of_locked = error_on_opening(locked);
    of_secret = error_on_opening(secret);
  }
  CHECK(of_closed.starts_with("--csv " + closed + "/a.csv: cannot be written; "));
  CHECK(of_locked.starts_with("--csv " + locked + ": cannot be written; "));
  CHECK(of_secret.starts_with("--csv " + secret + ": cannot be written; "));
}

TEST_CASE("csv: the message names the option that the path was given to") {
  const Folder folder;
  try {
    CsvFile("--profile-csv", folder / "no/a.csv", kHeader);
    FAIL("not refused");
  } catch (const UsageError &error) {
    CHECK(std::string(error.what()).starts_with("--profile-csv " + (folder / "no/a.csv") + ": "));
  }
}

namespace {

/// A disk that is full: no file can grow beyond some size.
struct FullDisk {
  rlimit limit_before;
  void (*handler_before)(int) = std::signal(SIGXFSZ, SIG_IGN);

  explicit FullDisk(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &limit_before);
    const rlimit limit{bytes, limit_before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  FullDisk(const FullDisk &) = delete;
  FullDisk &operator=(const FullDisk &) = delete;
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &limit_before);
    std::signal(SIGXFSZ, handler_before);
  }
};

/// The message of the UsageError that appending to a file on a full disk throws, or "".
std::string error_on_full_disk(const CsvFile &file, rlim_t bytes,
                               const std::vector<std::string> &rows) {
  const FullDisk disk(bytes);
  try {
    file.append(rows);
  } catch (const UsageError &error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("csv: when writing fails, the error says so and the file is as it was") {
  const Folder folder;
  const std::string path = folder / "a.csv";
  const CsvFile file("--csv", path, kHeader);
  // Room for a part of what is to be written: of the header of a new file, then of the rows.
  CHECK(error_on_full_disk(file, 10, {"1,a,1"}) == "--csv " + path + ": writing failed");
  CHECK(read_text(path) == "");
  file.append({"1,a,1"});
  const std::string before = read_text(path);
  CHECK(before == "step,device,ms\n1,a,1\n");
  CHECK(error_on_full_disk(file, before.size() + 10, {"2,b,2", "3,c,3", "4,d,4"}) ==
        "--csv " + path + ": writing failed");
  CHECK(read_text(path) == before);
  file.append({"2,b,2"});
  CHECK(read_text(path) == before + "2,b,2\n");
}
