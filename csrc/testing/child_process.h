// Real processes in tests: a child is this test's own program, started again with a role. It talks
// by lines: the parent reads what the role prints and writes what it waits for, so that tests stop,
// kill and go on at known places. Whatever a test does, its children end with it.
//
//   int Echo(const std::vector<std::string>& arguments) { ... }       // reads stdin, prints lines
//   TEST(...) { ChildProcess child("echo", {"3"}); child.ReadLine(deadline); child.Kill(SIGKILL); }
//   int main(int argc, char** argv) { return MainWithRoles(argc, argv, {{"echo", Echo}}); }
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "csrc/refit/deadline.h"

namespace tandem {

class ChildProcess {
 public:
  using Role = int (*)(const std::vector<std::string>& arguments);

  ChildProcess(const std::string& role, const std::vector<std::string>& arguments);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();  // kills

  pid_t pid() const { return pid_; }
  // The next line without its end; "<end>" when there is none, "<late>" at the deadline.
  std::string ReadLine(const Deadline& deadline);
  void WriteLine(const std::string& line);
  void Kill(int signal) const;
  // The exit code, -signal of a killed one; -1000 at the deadline.
  int Wait(const Deadline& deadline);

 private:
  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  std::string pending_;
  bool has_ended_ = false;
  int exit_code_ = 0;
};

// In a child: prints a line at once; waits for one (false at the end of input).
void PrintLine(const std::string& line);
bool AwaitLine();

// Runs a role, or all tests of the program.
int MainWithRoles(int argc, char** argv, const std::map<std::string, ChildProcess::Role>& roles);

}  // namespace tandem
