#include "csrc/testing/child_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace tandem {
namespace {

constexpr char kRoleFlag[] = "--role=";
constexpr char kProgram[] = "/proc/self/exe";

int Milliseconds(const Deadline& deadline) {
  return static_cast<int>(deadline.Seconds() * 1000) + 1;
}

bool AwaitReadable(int file, const Deadline& deadline) {
  pollfd entry = {file, POLLIN, 0};
  while (!deadline.HasPassed()) {
    if (poll(&entry, 1, Milliseconds(deadline)) > 0) return true;
  }
  return false;
}

}  // namespace

ChildProcess::ChildProcess(const std::string& role, const std::vector<std::string>& arguments) {
  int to_child[2];
  int from_child[2];
  if (pipe2(to_child, O_CLOEXEC) != 0 || pipe2(from_child, O_CLOEXEC) != 0) std::abort();
  std::vector<std::string> words = {kProgram, kRoleFlag + role};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);
    dup2(to_child[0], STDIN_FILENO);
    dup2(from_child[1], STDOUT_FILENO);
    execv(kProgram, pointers.data());
    _exit(127);
  }
  close(to_child[0]);
  close(from_child[1]);
  input_ = to_child[1];
  output_ = from_child[0];
}

ChildProcess::~ChildProcess() {
  if (!has_ended_) {
    Kill(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close(input_);
  close(output_);
}

std::string ChildProcess::ReadLine(const Deadline& deadline) {
  for (;;) {
    const size_t end = pending_.find('\n');
    if (end != std::string::npos) {
      const std::string line = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      return line;
    }
    if (!AwaitReadable(output_, deadline)) return "<late>";
    char text[4096];
    const ssize_t size = read(output_, text, sizeof(text));
    if (size <= 0) return "<end>";
    pending_.append(text, static_cast<size_t>(size));
  }
}

void ChildProcess::WriteLine(const std::string& line) {
  const std::string text = line + "\n";
  if (write(input_, text.data(), text.size()) < 0) ADD_FAILURE() << "the child reads no more";
}

void ChildProcess::Kill(int signal) const { kill(pid_, signal); }

int ChildProcess::Wait(const Deadline& deadline) {
  if (has_ended_) return exit_code_;
  const int handle = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  const bool has_ended = handle >= 0 && AwaitReadable(handle, deadline);
  if (handle >= 0) close(handle);
  int status = 0;
  if (!has_ended || waitpid(pid_, &status, 0) != pid_) return -1000;
  has_ended_ = true;
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return exit_code_;
}

void PrintLine(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

bool AwaitLine() {
  for (;;) {
    const int character = std::getchar();
    if (character == '\n') return true;
    if (character == EOF) return false;
  }
}

int MainWithRoles(int argc, char** argv, const std::map<std::string, ChildProcess::Role>& roles) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first.rfind(kRoleFlag, 0) == 0) {
    const auto role = roles.find(first.substr(sizeof(kRoleFlag) - 1));
    if (role == roles.end()) return 2;
    return role->second(std::vector<std::string>(argv + 2, argv + argc));
  }
  signal(SIGPIPE, SIG_IGN);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace tandem
