// CSV files that are appended to: whole rows or nothing, under one header.
#pragma once

#include <string>
#include <vector>

// The headers of what a step's program writes; --describe prints them.
constexpr const char *kCsvHeader =
    "step,device,batch,heads,seqlen,head_dim,options,operations,kv_bytes,median_ms,min_ms,tflops,"
    "rms_error";
constexpr const char *kProfileCsvHeader =
    "step,source,batch,heads,seqlen,head_dim,options,line,counter,value";
constexpr const char *kBlocksCsvHeader =
    "step,batch,heads,seqlen,head_dim,options,launch,block,x,y,z,mma";
constexpr const char *kEventsCsvHeader =
    "step,batch,heads,seqlen,head_dim,options,launch,warpgroup,event,what,line,of,times,after";
constexpr const char *kTraceCsvHeader = "line,op,request,lane,address,bytes,bank,wavefront";

class CsvFile {
 public:
  /// Checks that the file can be appended to, and that it is new, empty or has this header. Writes
  /// nothing. Throws UsageError.
  CsvFile(std::string option, std::string path, std::string header);

  /// Appends rows, after the header if the file is new. Throws UsageError.
  void append(const std::vector<std::string> &rows) const;

 private:
  std::string option_, path_, header_;
};

/// Whether two paths, neither of them empty, name one file, also one that does not exist yet.
bool same_file(const std::string &a, const std::string &b);
