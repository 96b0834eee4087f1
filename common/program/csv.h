// SPDX-License-Identifier: MIT
// What a run writes into files: CSV files are appended to, whole rows or nothing, under one header; a trace is
// written anew.
#pragma once

#include <string>
#include <vector>

/// What a run can write into a file. What has no header is written anew.
enum CsvKind {
  kResultCsv,
  kProfileCsv,
  kTraceCsv,
  kBlocksCsv,
  kEventsCsv,
  kStreamsCsv,
  kTrace,
  kCsvKinds
};

#define PROBLEM_COLUMNS "batch,heads,seqlen,head_dim,options"
constexpr struct {
  const char *option, *header, *help;
} kCsv[kCsvKinds] = {
    {"csv",
     "step,device," PROBLEM_COLUMNS ",operations,kv_bytes,median_ms,min_ms,sm_clocks,tflops,"
     "rms_error",
     "append the result as a row"},
    {"profile-csv", "step,source," PROBLEM_COLUMNS ",line,counter,value",
     "append the emulator's counts"},
    {"trace-csv", "line,op,request,lane,address,bytes,bank,wavefront",
     "append the bank that each lane accesses, for the bank maps"},
    {"blocks-csv", "step," PROBLEM_COLUMNS ",launch,block,x,y,z,mma",
     "append how many mma each block did, in the order of their start"},
    {"events-csv", "step," PROBLEM_COLUMNS ",launch,warpgroup,event,what,line,of,times,after",
     "append what block 0's warpgroups did, and what had to come before it"},
    {"streams-csv", "step,device," PROBLEM_COLUMNS ",gpu,stream,what,line,peer,bytes,begin,end",
     "append what each GPU's streams did, and when, with --gpus: in mma by a\n"
     "model, or with --device gpu in nanoseconds"},
    {"trace", "",
     "write what the first block of each launch, or its cluster, did on the\n"
     "emulator, or with --gpus what each GPU's streams did, for\n"
     "ui.perfetto.dev or chrome://tracing"}};
#undef PROBLEM_COLUMNS

class CsvFile {
 public:
  /// Checks that the file can be written to, and that it is new, empty or has this header, if that is not
  /// empty. Writes nothing. Throws UsageError.
  CsvFile(std::string option, std::string path, std::string header);

  /// Appends rows, after the header if the file is new; without a header, replaces all that is there. Throws UsageError.
  void append(const std::vector<std::string> &rows) const;

 private:
  std::string option_, path_, header_;
};

/// Whether two paths, neither of them empty, name one file, also one that does not exist yet.
bool same_file(const std::string &a, const std::string &b);
