// SPDX-License-Identifier: MIT
#include "common/pages/docs.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "common/testing/process.h"

namespace fs = std::filesystem;

namespace {

const char kBenchHeader[] =
    "step,device,batch,heads,seqlen,head_dim,options,median_ms,min_ms,tflops,rms_error\n";
const std::string kProblemColumns = "step,source,batch,heads,seqlen,head_dim,options,line,";

const char kBench[] =
    "00-standard,NVIDIA H200,2,16,8192,128,,400,390,2.5,1e-4\n"
    "02-loop,NVIDIA H200,16,16,8192,128,,880,870,10,1e-4\n"
    "02-loop,NVIDIA H200,16,16,8192,128,,900,870,20,1e-4\n"
    "02-loop,NVIDIA H200,16,16,8192,128,,890,870,12,1e-4\n"
    "02-loop,NVIDIA H200,16,16,8192,128,causal kv-heads=2,500,490,21,1e-4\n"
    "02-loop,NVIDIA H200,2,16,1024,64,,3,2,9,1e-4\n"
    "02-loop,NVIDIA H200,4,16,1024,64,,6,4,8,1e-4\n"
    "03-banks:padded,NVIDIA H200,2,16,8192,128,,5,5,99,1e-4\n"
    "03-banks:padded,NVIDIA H200,16,16,8192,128,,500,490,17.5,1e-4\n"
    "05-tensor,NVIDIA H200,16,16,8192,128,,200,199,240,1e-4\n"
    "06-dead-end,NVIDIA H200,16,16,8192,128,,220,210,200,1e-4\n"
    "07-later,NVIDIA H200,16,16,8192,128,,110,109,360,1e-4\n"
    "07-later,NVIDIA H200,16,16,1024,64,,3,2,150,1e-4\n"
    "20-causal,NVIDIA H200,16,16,8192,128,,100,99,390,1e-4\n"
    "30-tma,NVIDIA H200,16,16,8192,128,,100,99,410,1e-4\n"
    "flash-attention-2,NVIDIA H200,16,16,8192,128,,25,24,400,1e-4\n"
    "matmul-fp16,NVIDIA H200,1,1,16384,16384,,12,12,744,0\n";

const std::string kCounters =
    kProblemColumns +
    "global bytes read,shared wavefronts,dram bytes,\"barriers, block\",mma\n"
    "02-loop,emulator,1,1,256,64,,0,1048576,3000,,,\n"
    "02-loop,ncu,1,1,256,64,,0,1048576,4000,5e5,,\n"
    "02-loop,emulator,1,1,256,64,,41,1000,0,,,\n"
    "02-loop,emulator,1,1,256,64,,9,,2500.5,,,\n"
    "00-standard,emulator,1,1,256,64,,0,500,,,,\n"
    "00-standard,emulator,1,1,512,64,,0,,,,7,\n"
    "00-standard,emulator,2,1,512,64,,0,,,,8,\n";

const char kCeilings[] =
    "name,value,unit\nmma,640,TFLOP/s\nmma-ex2,600,TFLOP/s\ncopy,4.28,TB/s\nfp32-peak,67,TFLOP/s\n"
    "mma-clock,1.755,GHz\n";

const char kSource[] =
    "// Before      step 00: a wall\n"
    "void f() {\n"
    "  for (;;) {\n"
    "\n"
    "    step();\n"
    "  }\n"
    "  step();\n"
    "}\n";

/// A repository in a temporary directory, removed at the end.
struct Repository {
  fs::path root = fs::temp_directory_path() / ("docs_test's." + std::to_string(getpid()));

  Repository() {
    write("plots/results/gpu.csv", std::string(kBenchHeader) + kBench);
    write("plots/results/gpu-ceilings.csv", kCeilings);
    write("plots/results/gpu-counters.csv", kCounters);
    write("steps/00-standard/README.md", "# Step 00: the memory wall\n\nText: none.\n");
    write("steps/02-loop/README.md", "# Step 02: the loop inverted\n");
    write("steps/02-loop/attention.cu", kSource);
    write("steps/05-tensor/attention.cu", "// Step 05.\n");
    write("steps/06-dead-end/attention.cu", "");
    write("steps/07-later/attention.cu", "");
    write("build/ladder.csv",
          "\"step\",\"needs\",\"why\",\"takes\",\"before\",\"archs\"\n"
          "\"02-loop\",\"sm_75\",\"\",\"\",\"00\",\"\"\n"
          "\"05-tensor\",\"sm_80\",\"cp.async, mma.m16n8k16\",\"\",\"02\",\"sm_80\"\n"
          "\"06-dead-end\",\"sm_80\",\"\",\"\",\"05\",\"\"\n"
          "\"07-later\",\"sm_80\",\"mma\",\"\",\"05\",\"\"\n");
  }
  ~Repository() { fs::remove_all(root); }

  void write(const fs::path &file, const std::string &text) const {
    fs::create_directories((root / file).parent_path());
    std::ofstream(root / file) << text;
  }

  std::string read(const fs::path &file) const { return read_text(root / file); }

  /// What the text of a page becomes; throws its errors without the file's name.
  std::string made(const fs::path &file, const std::string &text) const {
    write(file, text);
    std::ostringstream stale, errors;
    docs::run({root / file}, root, false, stale, errors);
    if (errors.str().empty()) return read(file);
    throw docs::Error(errors.str().substr((root / file).string().size()));
  }

  std::string value(const std::string &expression) const {
    const std::string open = "a <!--=" + expression + "-->", close = "<!--/-->\n";
    const std::string text = made("page.md", open + "?" + close);
    return text.substr(open.size(), text.size() - open.size() - close.size());
  }

  /// What a region becomes.
  std::string region(const fs::path &file, const std::string &kind, const std::string &body) const {
    const std::string open = "<!-- " + kind + ": " + body + " -->\n",
                      close = "<!-- /" + kind + " -->\n";
    const std::string text = made(file, open + close);
    return trim(text.substr(open.size(), text.size() - open.size() - close.size()));
  }

  std::string table(const std::string &arguments) const {
    return region("page.md", "table", arguments);
  }

  std::string output(const std::string &arguments) const {
    return region("page.md", "output", arguments);
  }

  std::string quote(const std::string &arguments) const {
    return region("steps/02-loop/page.md", "code", arguments);
  }

  /// The error of a file with this text, or "".
  std::string error(const std::string &text) const {
    try {
      made("a.md", text);
    } catch (const docs::Error &e) {
      return "a.md" + std::string(e.what());
    }
    return "";
  }
};

/// The message of the docs::Error that `f` throws.
template <typename F>
std::string message(F f) {
  try {
    f();
  } catch (const docs::Error &e) {
    return e.what();
  }
  return "nothing was thrown";
}

bool has(const std::string &text, const std::string &part) {
  INFO("text: ", text);
  INFO("part: ", part);
  const bool found = text.find(part) != text.npos;
  CHECK(found);
  return found;
}

}  // namespace

TEST_CASE("docs: formats of a value") {
  Repository r;
  CHECK(r.value("1234.5678") == "1,230");
  CHECK(r.value("9.999") == "10.0");
  CHECK(r.value("999.6") == "1,000");
  CHECK(r.value("0.012345") == "0.0123");
  CHECK(r.value("0") == "0.00");
  CHECK(r.value("744.4:s2") == "740");
  CHECK(r.value("1234.5678:0") == "1235");
  CHECK(r.value("1234.5678:2") == "1234.57");
  CHECK(r.value("1234567.8:,") == "1,234,568");
  CHECK(r.value("0-999:,") == "-999");
  CHECK(r.value("0-999999:,") == "-999,999");
  CHECK(r.value("-0.2:,") == "0");
  CHECK(r.value("-0.002:%") == "0%");
  CHECK(r.value("0.456:%") == "46%");
  CHECK(r.value("0.456:%1") == "45.6%");
  CHECK(r.value("7.31:x") == "7.3×");
  CHECK(r.value("1.066:x") == "1.07×");
  CHECK(r.value("296.2:x") == "296×");
  CHECK(r.value("0.456:%s") == "46%");
  CHECK(r.value("0.0456:%s") == "4.6%");
  has(message([&] { r.value("1:s0"); }), "unknown format 's0'; allowed: 0 1 2..");
  for (const std::string format : {"furlongs", "%%", "%%0", "%x", "%,", "%s0", "%10", ""})
    has(message([&] { r.value("1:" + format); }), "unknown format '" + format + "'");
}

TEST_CASE("docs: arithmetic") {
  Repository r;
  CHECK(r.value("2 + 3 * 4:0") == "14");
  CHECK(r.value("(2 + 3) * 4:0") == "20");
  CHECK(r.value("10 - 4 - 3:0") == "3");
  CHECK(r.value("16 / 4 / 2:0") == "2");
  CHECK(r.value("-(1 + 1) * 3:0") == "-6");
  CHECK(r.value("4 * 8192 * 8192 * 128:,") == "34,359,738,368");
  for (const char *text : {"1 +", "1 2", "(1", "[gpu", "1)", "()", "x", ""})
    has(message([&] { r.value(text); }),
        "no arithmetic over numbers and [keys]: '" + std::string(text) + "', from '");
  has(message([&] { r.value("1 2"); }), "from '2' on");
  has(message([&] { r.value("1 / (2 - 2)"); }), "division by zero");
}

TEST_CASE("docs: a benchmark's key is the median of the rows that match") {
  Repository r;
  CHECK(r.value("[gpu tflops 02-loop]") == "12.0");
  CHECK(r.value("[gpu median_ms 02-loop]:0") == "890");
  CHECK(r.value("[gpu tflops 03-banks:padded batch=16]:1") == "17.5");
  CHECK(r.value("[gpu tflops flash-attention-2] / [gpu tflops 02-loop]:x") == "33×");
  CHECK(r.value("[gpu tflops 02-loop seqlen=1024 head_dim=64 batch=4]:0") == "8");
  CHECK(r.value("[gpu tflops 02-loop options=causal+kv-heads=2]:0") == "21");
  CHECK(r.value("[gpu tflops matmul-fp16 seqlen=16384 head_dim=16384]:0") == "744");

  has(message([&] { r.value("[gpu tflops 02-loop seqlen=1024 head_dim=64]"); }),
      "several rows of 02-loop match, filter by batch: 2; 4");
  has(message([&] { r.value("[tpu tflops 02-loop]"); }), "no rows in ");
  has(message([&] { r.value("[gpu speed 02-loop]"); }), "no column 'speed'; there are: batch");
  has(message([&] { r.value("[gpu tflops 03-loop]"); }),
      "no step=03-loop in gpu.csv; there are: 00-standard; 02-loop; 03-banks:padded;");
  has(message([&] { r.value("[gpu tflops 02-loop seqlen=7]"); }),
      "no seqlen=7 in gpu.csv; there are: 1024; 8192");
  has(message([&] { r.value("[gpu tflops 02-loop colour=7]"); }),
      "no column 'colour'; there are: batch device");
  has(message([&] { r.value("[gpu]"); }), "a key is [FILE COLUMN STEP] or [FILE NAME], not [gpu]");
  has(message([&] { r.value("[gpu tflops]"); }), "no column 'name'; there are: batch");
}

TEST_CASE("docs: a counter's key is the one value of the rows that match") {
  Repository r;
  CHECK(r.value("[gpu-counters emulator global bytes read 02-loop]:,") == "1,048,576");
  CHECK(r.value("[gpu-counters ncu dram bytes 02-loop]:,") == "500,000");
  CHECK(r.value("[gpu-counters emulator shared wavefronts 02-loop line=9]:1") == "2500.5");
  CHECK(r.value("[gpu-counters emulator barriers, block 00-standard seqlen=512 batch=2]:0") == "8");
  CHECK(r.value("[gpu-counters emulator barriers, block 00-standard seqlen=512]:0") == "7");
  has(message([&] {
        r.value("[gpu-counters emulator barriers, block 00-standard seqlen=512 batch~]");
      }),
      "several rows of 00-standard match, filter by batch: 1; 2");
  has(message([&] { r.value("[gpu-counters guess global bytes read 00-standard]"); }),
      "no column 'guess'; there are: batch counter emulator");
  has(message([&] { r.value("[gpu-counters ncu barriers 02-loop]"); }),
      "no counter=barriers in gpu-counters.csv; there are: barriers, block; dram bytes;");
  has(message([&] { r.value("[gpu-counters ncu 02-loop]"); }), "filter by counter: dram bytes;");
  r.write("plots/results/twice-counters.csv",
          kProblemColumns + "mma\na,ncu,1,1,64,64,,0,1\na,ncu,1,1,64,64,,0,2\n");
  has(message([&] { r.value("[twice-counters ncu mma a]"); }),
      "two values of mma: a,ncu,1,1,64,64,,0,2");
}

TEST_CASE("docs: a ceiling's key") {
  Repository r;
  CHECK(r.value("[gpu-ceilings mma]:0") == "640");
  CHECK(r.value("[gpu tflops 07-later] / [gpu-ceilings mma-ex2]:%") == "60%");
  CHECK(r.value("1e3 * [gpu-ceilings copy]") == "4,280");
  has(message([&] { r.value("[gpu-ceilings mma-ex]"); }),
      "no name=mma-ex in gpu-ceilings.csv; there are: copy; fp32-peak; mma; mma-clock; mma-ex2");
  has(message([&] { r.value("[tpu-ceilings mma]"); }), "tpu-ceilings.csv");
  has(message([&] { r.value("[gpu-ceilings mma seqlen=1]"); }),
      "no column 'seqlen'; there are: name");
}

TEST_CASE("docs: a CSV file with other columns, or a field that is no number") {
  Repository r;
  r.write("plots/results/old.csv", "step,batch\n02-loop,1\n");
  r.write("plots/results/short.csv", std::string(kBenchHeader) + "02-loop,NVIDIA H200\n");
  r.write("plots/results/nan.csv", std::string(kBenchHeader) + "a,b,1,1,8192,128,,1,1,fast,1\n");
  r.write("plots/results/empty.csv", kBenchHeader);
  has(message([&] { r.value("[old tflops 02-loop]"); }),
      "no column 'tflops'; there are: batch step");
  has(message([&] { r.value("[short tflops 02-loop]"); }),
      "short.csv: '02-loop,NVIDIA H200': the columns must be step,");
  has(message([&] { r.value("[nan tflops a]"); }), "tflops 'fast' is no number");
  has(message([&] { r.value("[empty tflops a]"); }), "empty.csv");
}

TEST_CASE("docs: tables of speeds") {
  Repository r;
  const std::string heading =
      "| step | the idea | TFLOP/s | ms | batch | × the step before | of FlashAttention-2 | "
      "of its ceiling |\n"
      "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n";
  CHECK(
      r.table("ladder gpu") ==
      heading +
          "| [00-standard](steps/00-standard/README.md) | the memory wall | 2.50 | 400 | 2 | — | "
          "0.62% | 3.7% of fp32 |\n"
          "| [02-loop](steps/02-loop/README.md) | the loop inverted | 12.0 | 890 | 16 | 4.8× (00) "
          "| "
          "3.0% | 18% of fp32 |\n"
          "| [05-tensor](steps/05-tensor/README.md) | — | 240 | 200 | 16 | 20× (02) | 60% | 40% of "
          "mma |\n"
          "| [06-dead-end](steps/06-dead-end/README.md) | — | 200 | 220 | 16 | 0.83× | 50% | 299% "
          "of "
          "fp32 |\n"
          "| [07-later](steps/07-later/README.md) | — | 360 | 110 | 16 | 1.50× (05) | 90% | 60% of "
          "mma "
          "|");
  CHECK(r.table("peers gpu") ==
        "| peer | TFLOP/s | ms | batch |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| flash-attention-2 | 400 | 25.0 | 16 |");
  r.write("steps/02-loop/variants/wide.patch", "Loads of 1.5 words: a\nguess. More.\n--- a/x\n");
  r.write("plots/results/gpu-variants-02.csv",
          std::string(kBenchHeader) + "02-loop:wide,NVIDIA H200,16,16,8192,128,,445,1,24,1\n" +
              "02-loop:odd,NVIDIA H200,16,16,8192,128,,1780,1,6,1\n" +
              "02-loop,NVIDIA H200,16,16,8192,128,,890,1,12,1\n" +
              "00-standard,NVIDIA H200,16,16,8192,128,,3560,1,3,1\n");
  CHECK(r.table("variants gpu-variants-02") ==
        "| variant | TFLOP/s | ms | batch | × the step | what it tries |\n"
        "| --- | ---: | ---: | ---: | ---: | --- |\n"
        "| 00-standard | 3.00 | 3,560 | 16 | 0.25× | the step before |\n"
        "| 02-loop | 12.0 | 890 | 16 | 1.00× | the step |\n"
        "| odd | 6.00 | 1,780 | 16 | 0.50× | — |\n"
        "| wide | 24.0 | 445 | 16 | 2.0× | Loads of 1.5 words: a guess. |");
}

TEST_CASE("docs: tables of the problems of Part III") {
  Repository r;
  r.write("steps/20-causal/attention.cu", "// Takes       --causal\n");
  r.write("steps/20-causal/README.md", "# Step 20: half the work\n");
  r.write("steps/25-cache/attention.cu", "// Takes       --seqlen-k, --kv-heads\n");
  r.write("plots/models.csv",
          "step,batch,heads,seqlen,head_dim,options\n20,16,16,8192,128,causal\n"
          "25,1,64,1,128,seqlen-k=131072 kv-heads=8\n");
  const std::string decode = ",1,64,1,128,seqlen-k=131072 kv-heads=8,536870912,";
  const std::string kModelsHeader =
      "step,device,batch,heads,seqlen,head_dim,options,kv_bytes,median_ms,min_ms,tflops,rms_"
      "error\n";
  r.write("plots/results/gpu-models.csv",
          kModelsHeader + "20-causal,H,16,16,8192,128,causal,1073741824,11,11,400,1\n" +
              "20-causal,H,16,16,8192,128,causal,1073741824,11,11,410,1\n" +
              "20-causal:slow,H,16,16,8192,128,causal,1073741824,30,30,100,1\n" +
              "20-causal,H,8,16,8192,128,causal,1073741824,11,11,900,1\n" +
              "20-causal,H,16,16,8192,128,,1073741824,11,11,300,1\n" +
              "flash-attention-2,H,16,16,8192,128,causal,1073741824,12,12,360,1\n" +
              "flash-attention-3-bf16,H,16,16,8192,128,causal,1073741824,9,9,500,1\n" +
              "25-cache,H" + decode + "0.134217728,0.1,1,1\n" + "cudnn,H" + decode +
              "0.2,0.1,1,1\n");
  CHECK(
      r.table("models ../models gpu-models") ==
      "| step | the idea | problem | speed | × FlashAttention-2 | × FlashAttention-3 | × cuDNN |\n"
      "| --- | --- | --- | ---: | ---: | ---: | ---: |\n"
      "| [20-causal](steps/20-causal/README.md) | half the work | batch 16, 16 heads, seqlen 8192, "
      "head dim 128, causal | 405 TFLOP/s | 1.09× | 0.82× | — |\n"
      "| [25-cache](steps/25-cache/README.md) | — | batch 1, 64 heads, seqlen 1, head dim 128, "
      "seqlen-k=131072 kv-heads=8 | 4.00 TB/s | — | — | 1.49× |");
  has(message([&] { r.table("models ../models gpu"); }), "nothing is measured for 'speed");
  CHECK(r.value("[gpu-models cache_TBs 25-cache seqlen=1 options~kv-heads=8]:2") == "4.00");
  CHECK(r.table("problems gpu-models tflops 20-causal 20-causal:slow flash-attention-2 options~") ==
        "| batch | 20-causal | 20-causal:slow | flash-attention-2 |\n"
        "| ---: | ---: | ---: | ---: |\n"
        "| 8 | 900 | — | — |\n| 16 | 405 | 100 | 360 |\n| 16 | 300 | — | — |");
  has(message([&] { r.table("problems gpu-models tflops 20-other"); }),
      "no step=20-other in gpu-models.csv; there are: ");
  has(message([&] { r.table("problems gpu-models tflops 20-causal 20-other options~"); }),
      "nothing is measured for '20-other");
  has(message([&] { r.table("problems gpu-models speed 20-causal options~"); }),
      "nothing is measured for '20-causal");
}

TEST_CASE("docs: a table of the steps of Part IV in both types") {
  Repository repository;
  const auto measured = [](const std::string &name, const std::string &options, double tflops) {
    return name + ",NVIDIA H200,16,16,8192,128," + options + ",1,1," + std::to_string(tflops) +
           ",0\n";
  };
  repository.write("steps/33-pair/README.md", "# Step 33: two of them\n");
  repository.write("plots/results/gpu-hopper.csv",
                   kBenchHeader + measured("30-tma", "", 400) + measured("30-tma", "", 408) +
                       measured("33-pair", "", 600) + measured("33-pair", "type=bf16", 640) +
                       measured("33-pair", "causal type=bf16", 500) +
                       measured("33-pair:64-keys", "type=bf16", 500) +
                       measured("39-bytes", "type=fp8", 1000) +
                       measured("flash-attention-3-bf16", "", 200) +
                       measured("flash-attention-3-bf16", "type=bf16", 700) +
                       measured("flash-attention-3-bf16", "causal type=bf16", 300) +
                       measured("cudnn", "type=bf16", 610));
  CHECK(repository.table("types gpu-hopper") ==
        "| step | the idea | fp16, TFLOP/s | bf16, TFLOP/s | × FlashAttention-3 |\n"
        "| --- | --- | ---: | ---: | ---: |\n"
        "| [30-tma](steps/30-tma/README.md) | — | 404 | — | 0.58× (fp16) |\n"
        "| [33-pair](steps/33-pair/README.md) | two of them | 600 | 640 | 0.91× |");
  has(message([&] { repository.table("types gpu"); }), "nothing is measured for 'bf16, TFLOP/s");
}

TEST_CASE("docs: tables of counters") {
  Repository r;
  std::string more = kCounters;
  for (const char *options : {"causal", "window=1", "window=2"})
    for (const char *source : {"ncu", "emulator"})
      more += std::string("02-loop,") + source + ",1,1,256,64," + options + ",0,,,,,5\n";
  r.write("plots/results/tpu-counters.csv", more);
  CHECK(r.table("truth tpu-counters") ==
        "| step | problems | counts | equal | the others, and at how many problems |\n"
        "| --- | ---: | ---: | ---: | --- |\n"
        "| 02-loop | 4 | 5 | 4 | shared wavefronts (1) |");
  has(r.table("truth-sentence tpu-counters"),
      "; at batch 1, 1 head, seqlen 256, head dim 64, window=1; and at 1 more problems. The "
      "others");
  CHECK(r.value("[tpu-counters ncu mma 02-loop options=causal seqlen=256]:0") == "5");
  has(message([&] { r.value("[tpu-counters ncu mma 02-loop]"); }),
      "no options= in tpu-counters.csv; there are: causal; window=1");
  CHECK(r.table("counters gpu-counters step=02-loop") ==
        "| counter | emulator | ncu | difference |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| global bytes read | 1,048,576 | 1,048,576 | equal |\n"
        "| shared wavefronts | 3,000 | 4,000 | -25% |\n"
        "| dram bytes | — | 500,000 | — |");
  // What ncu has not measured is not compared.
  CHECK(r.table("truth gpu-counters").find("00-standard") == std::string::npos);
  CHECK(r.table("truth-sentence gpu-counters seqlen=256") ==
        "1 of 2 counts equal ncu's, at batch 1, 1 head, seqlen 256, head dim 64. "
        "The others, by step: shared wavefronts (02).");
  r.write("plots/results/no-ncu-counters.csv",
          kProblemColumns + "mma\n02-loop,emulator,1,1,256,64,,0,5\n");
  for (const std::string name : {"truth", "truth-sentence"})
    has(message([&] { r.table(name + " no-ncu-counters"); }),
        "ncu has measured nothing in no-ncu-counters");
  has(message([&] { r.table("counters gpu-counters step=03-banks"); }), "no step=03-banks");
  has(message([&] {
        r.table("counters gpu-counters step=00-standard batch~ seqlen~");
      }),  // never mixed
      "several rows of 00-standard match, filter by batch: 1; 2");
}

TEST_CASE("docs: sustained speed, and a variant beside the noise") {
  Repository r;
  r.write("plots/results/gpu-sustained.csv",
          "step,seqlen,head_dim,options,tflops,mhz,smi_mhz,watts\n"
          "02-loop,8192,128,,406,1800,1829,686\n02-loop,8192,128,inputs=ends,410,,1980,\n"
          "mma,,,,580,1704,1920,690\n");
  CHECK(r.table("sustained gpu-sustained options~ seqlen~ head_dim~") ==
        "| run | W | GHz | GHz by nvidia-smi | TFLOP/s | TFLOP/s per GHz |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| 02-loop | 686 | 1.800 | 1.829 | 406 | 225.6 |\n"
        "| 02-loop inputs=ends | — | — | 1.980 | 410 | — |\n"
        "| mma | 690 | 1.704 | 1.920 | 580 | 340.4 |");
  r.write(
      "plots/results/gpu-variants-02.csv",
      "step,device,batch,heads,seqlen,head_dim,options,median_ms,tflops,speed_ratio,in_time,"
      "in_clocks\n"
      "02-loop,NVIDIA H200,16,16,8192,128,,890,12,,1×,1×\n"
      "02-loop:control,NVIDIA H200,16,16,8192,128,,890,12,,\"level, to 2%\",\"level, to 0.1%\"\n"
      "02-loop:wide,NVIDIA H200,16,16,8192,128,,900,12,,level,0.99× (0.98 to 0.991)\n");
  CHECK(r.table("variants gpu-variants-02") ==
        "| variant | TFLOP/s | ms | batch | × the step | × the step, in clocks | what it tries |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |\n"
        "| 02-loop | 12.0 | 890 | 16 | 1× | 1× | the step |\n"
        "| control | 12.0 | 890 | 16 | level, to 2% | level, to 0.1% | the step once more: the "
        "noise |\n"
        "| wide | 12.0 | 900 | 16 | level | 0.99× (0.98 to 0.991) | — |");
  // What is level has no number to quote.
  has(message([&] { r.value("[gpu-variants-02 speed_ratio 02-loop:wide]:x"); }), "no speed_ratio");
}

TEST_CASE("docs: what each step costs, and what is not measured yet") {
  Repository r;
  r.write("plots/results/sm_90-code.csv",
          "step,head_dim,registers,instructions\n02-loop,64,250,1000\n00-standard,64,9,1\n"
          "02-loop,128,255,1100\n");
  const std::string table =
      "costs sm_90-code gpu-cycles step~^0[0-2]- head_dim=64 batch=8 options=causal";
  CHECK(r.table(table).ends_with(
      "| instructions | registers |\n| --- | --- | ---: | ---: |\n"
      "| [00-standard](steps/00-standard/README.md) | the memory wall | 1 | 9 |\n"
      "| [02-loop](steps/02-loop/README.md) | the loop inverted | 1,000 | 250 |"));
  r.write("plots/results/gpu-cycles.csv",
          "step,batch,seqlen,head_dim,options,median_ms,sm_clocks,sm_clocks_least,sm_clocks_most,"
          "watts\n"
          "02-loop,8,8192,64,causal,3,3000000,2990000,3010000,650.4\n"
          "02-loop,16,8192,64,causal,9,9000000,9000000,9000000,700\n");
  CHECK(r.table(table).ends_with("| 1,000 | 250 | 3.000 | 2.990 to 3.010 | 650 |"));
}

TEST_CASE("docs: a table that there is not") {
  Repository r;
  has(message([&] { r.table("steps gpu"); }), "NAME one of costs, counters, ladder, models, ");
  for (const char *arguments :
       {"ladder", "ladder gpu gpu", "models gpu", "models gpu gpu gpu", "problems gpu",
        "problems gpu tflops", "counters", "counters gpu-counters gpu"})
    has(message([&] { r.table(arguments); }), "a table is 'NAME FILE [filters]', 'models FILE");
  has(message([&] { r.table("ladder gpu-counters"); }), "nothing is measured for 'TFLOP/s");
  has(message([&] { r.table("ladder gpu kernel=total"); }), "no column 'kernel'; there are");
}

TEST_CASE("docs: quotes of output") {
  Repository r;
  CHECK(r.output("echo a; echo b 1>&2") == "```text\n$ echo a; echo b 1>&2\na\nb\n```");
  CHECK(
      r.output("cat steps/02-loop/attention.cu | for ( | }") ==
      "```text\n$ cat steps/02-loop/attention.cu\n...\n  for (;;) {\n\n    step();\n  }\n...\n```");
  CHECK(r.output("printf 'one\\ntwo\\nsix' |  | two") ==
        "```text\n$ printf 'one\\ntwo\\nsix'\none\ntwo\n...\n```");
  CHECK(r.output("echo WRONG; exit 1") == "```text\n$ echo WRONG; exit 1\nWRONG\n```");
  has(message([&] { r.output("echo no GPU; exit 3"); }), "'echo no GPU; exit 3' fails: no GPU");
  has(message([&] { r.output("./step-99"); }), "'./step-99' fails: ");
  has(message([&] { r.output("echo a | b |"); }), "one line of echo a must contain 'b', not 0: ");
  has(message([&] { r.output("a | b | c | d"); }),
      "a quote is 'FILE | FIRST | LAST' or 'COMMAND | FIRST | LAST'");
}

TEST_CASE("docs: code quotes") {
  Repository r;
  CHECK(r.quote("attention.cu | for (;;) | }") ==
        "```cuda\nfor (;;) {\n\n  step();\n}\n```\n"
        "<sub>[attention.cu](attention.cu#L3-L6), lines 3–6</sub>");
  CHECK(r.quote("attention.cu | // Before |") ==
        "```cuda\n// Before      step 00: a wall\n```\n<sub>[attention.cu](attention.cu#L1-L1), "
        "line 1</sub>");
  for (const char *lines : {" | a | b", " | a |", " |", " |  | b"})
    has(message([&] { r.quote("missing.cu" + std::string(lines)); }), "cannot read missing.cu");
  has(message([&] { r.quote("attention.cu |  | goto"); }),
      "no line of attention.cu from 1 on contains 'goto'");
  has(message([&] { r.quote("attention.cu | goto | }"); }),
      "one line of attention.cu must contain 'goto', not 0: ");
  has(message([&] { r.quote("attention.cu | void f | goto"); }),
      "no line of attention.cu from 2 on contains 'goto'");
  has(message([&] { r.quote("attention.cu | step(); | }"); }),
      "one line of attention.cu must contain 'step();', not 2: 7 5");
  has(message([&] { r.quote("attention.cu"); }), "a quote is 'FILE | FIRST | LAST'");
}

TEST_CASE("docs: errors name the file and the line") {
  Repository r;
  CHECK(r.error("no region, <!-- a comment -->, nothing\n") == "");
  has(r.error("a\nb <!--=[gpu tflops nobody]-->1<!--/-->\n"), "a.md:2: no step=nobody in gpu.csv");
  has(r.error("a <!--=1-->1 <!--=2-->2<!--/-->\n"), "a.md:1: ");
  has(r.error("a <!--=1-->1\n"), "a.md:1: a value is <!--=EXPR:FORMAT-->text<!--/-->, in one line");
  has(r.error("a <!--=1-->1 <!--/--> <!--=2-->2\n<!--/-->\n"), "a.md:1: a value is <!--=EXPR");
  has(r.error("a <!--/-->\n"), "a.md:1: a value is");
  has(r.error("a <!--/--> <!--=1-->1<!--/-->\n"), "a.md:1: a value is");
  has(r.error("\n<!-- table: peers gpu -->\n\n"), "a.md:2: unterminated, only <!-- /table --> may");
  has(r.error("<!-- table: peers gpu -->\n<!-- /code -->\n"),
      "a.md:1: unterminated, only <!-- /table --> may follow");
  has(r.error("<!-- /table -->\n"), "a.md:1: this comment ends nothing");
  has(r.error("<!-- table: peers gpu --> x\n<!-- /table -->\n"),
      "a.md:1: this comment ends nothing, or has no line of its own");
  has(r.error("a\n- <!--=1-->1<!--/-->\n"), "a.md:2: a value may not start a line");
  CHECK(r.error("a\n**<!--=1:0-->1<!--/-->** and 132 <!--=1:0-->1<!--/-->\n") == "");
}

TEST_CASE("docs: the program rewrites, is idempotent, and finds what is stale") {
  Repository r;
  const std::string chapter =
      "# Step 02: the loop inverted\n\nIt runs at <!--=[gpu tflops 02-loop]:0-->?<!--/--> "
      "TFLOP/s,\n"
      "which is <!--=[gpu tflops 02-loop] / [gpu tflops 00-standard]:x --><!--/--> faster.\n\n\n"
      "<!-- code: attention.cu | void f | void f -->\n<!-- /code -->\n\n"
      "1. A list:\n   <!-- table: peers gpu -->\n   old\n   <!-- /table -->\n";
  r.write("steps/02-loop/README.md", chapter);
  const Strings files = {r.root / "steps/02-loop/README.md"};
  std::ostringstream out, err;

  CHECK(docs::run(files, r.root, true, out, err) == 1);
  has(out.str(), "README.md:3: stale: It runs at <!--=");
  has(out.str(), "README.md:7: stale: <!-- code: attention.cu | void f | void f");
  has(out.str(), "README.md:11: stale: <!-- table: peers gpu");
  CHECK(r.read("steps/02-loop/README.md") == chapter);  // --check wrote nothing

  CHECK(docs::run(files, r.root, false, out, err) == 0);
  const std::string fresh = r.read("steps/02-loop/README.md");
  has(fresh, "It runs at <!--=[gpu tflops 02-loop]:0-->12<!--/--> TFLOP/s,\n");
  has(fresh, ":x -->4.8×<!--/--> faster.\n");
  has(fresh,
      "-->\n\n```cuda\nvoid f() {\n```\n<sub>[attention.cu](attention.cu#L2-L2), line "
      "2</sub>\n\n<!--");
  has(fresh, "   <!-- table: peers gpu -->\n\n   | peer |");
  has(fresh, "| 16 |\n\n   <!-- /table -->\n");

  CHECK(docs::run(files, r.root, false, out, err) == 0);
  CHECK(r.read("steps/02-loop/README.md") == fresh);
  CHECK(docs::run(files, r.root, true, out, err) == 0);

  r.write("steps/02-loop/attention.cu", "// one line more\n" + std::string(kSource));
  std::ostringstream moved;
  CHECK(docs::run(files, r.root, true, moved, err) == 1);
  has(moved.str(), ":7: stale: <!-- code: attention.cu");
  CHECK(err.str() == "");
}

TEST_CASE("docs: an error in one file leaves all files as they were") {
  Repository r;
  r.write("good.md", "a <!--=1:0-->?<!--/-->\n");
  r.write("bad.md", "a <!--=1:0-->?<!--/--> and <!--=[gpu]-->?<!--/-->\n");
  std::ostringstream out, err;
  const Strings files = {r.root / "good.md", r.root / "bad.md", r.root / "none.md"};
  CHECK(docs::run(files, r.root, false, out, err) == 2);
  has(err.str(), "bad.md:1: a key is [FILE COLUMN STEP]");
  has(err.str(), "none.md");
  CHECK(r.read("good.md") == "a <!--=1:0-->?<!--/-->\n");
  CHECK(r.read("bad.md") == "a <!--=1:0-->?<!--/--> and <!--=[gpu]-->?<!--/-->\n");
}

TEST_CASE("pages: the files that a page links to are there") {
  std::vector<fs::path> pages = {"README.md", "common/emulator/README.md"};
  for (const fs::directory_entry &entry : fs::recursive_directory_iterator("steps"))
    if (entry.path().extension() == ".md") pages.push_back(entry.path());
  int links = 0;
  for (const fs::path &page : pages) {
    const std::string text = read_text(page);
    for (std::size_t at = 0; (at = text.find("](", at)) != text.npos;) {
      at += 2;
      const std::size_t end = text.find_first_of(")# \n", at);
      const std::string target = text.substr(at, end - at);
      // A link's target has no space, unlike the parameters of a lambda.
      if (target.empty() || (text[end] != ')' && text[end] != '#') || contains(target, "://"))
        continue;
      CAPTURE(page);
      CAPTURE(target);
      CHECK(fs::exists(page.parent_path() / target));
      links++;
    }
  }
  CHECK(links > 50);
}
