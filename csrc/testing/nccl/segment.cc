#include "csrc/testing/nccl/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <random>

namespace tandem::testing {
namespace {

constexpr char kIdFormat[] = "tandem-test-nccl /proc/%d/fd/%d %016llx";

const char* NameOfType(int32_t type) {
  constexpr const char* kNames[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                    "uint64", "float16", "float32", "float64", "bfloat16"};
  return type >= 0 && type < static_cast<int32_t>(std::size(kNames)) ? kNames[type] : "no type";
}

// Descriptors that keep a segment alive until its ranks have entered it.
struct OwnIds {
  std::mutex mutex;
  std::map<std::string, int> fds;
};
OwnIds& Own() {
  static auto* own = new OwnIds;
  return *own;
}

std::string TextOf(const nccl::UniqueId& id) {
  return std::string(id.internal, strnlen(id.internal, sizeof(id.internal)));
}

std::string ErrnoText(const std::string& what) { return what + ": " + std::strerror(errno); }

}  // namespace

std::string Call::Describe() const {
  const std::string common = std::to_string(count) + " x " + NameOfType(type);
  if (kind == kBroadcast) return "broadcast(" + common + ", root " + std::to_string(root) + ")";
  return "all-reduce(" + common + ", op " + std::to_string(op) + ")";
}

nccl::Result MakeUniqueId(nccl::UniqueId* id, std::string* error) {
  const int fd = memfd_create("tandem-test-nccl", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(SegmentData)) != 0) {
    *error = ErrnoText("memfd_create");
    if (fd >= 0) close(fd);
    return nccl::kSystemError;
  }
  std::random_device random;
  const uint64_t nonce = (uint64_t{random()} << 32) | random();
  std::memset(id->internal, 0, sizeof(id->internal));
  std::snprintf(id->internal, sizeof(id->internal), kIdFormat, static_cast<int>(getpid()), fd,
                static_cast<unsigned long long>(nonce));
  OwnIds& own = Own();
  const std::lock_guard<std::mutex> lock(own.mutex);
  own.fds[TextOf(*id)] = fd;
  return nccl::kSuccess;
}

void ForgetUniqueId(const nccl::UniqueId& id) {
  OwnIds& own = Own();
  const std::lock_guard<std::mutex> lock(own.mutex);
  const auto found = own.fds.find(TextOf(id));
  if (found == own.fds.end()) return;
  close(found->second);
  own.fds.erase(found);
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, sizeof(SegmentData));
  if (fd_ >= 0) close(fd_);
}

std::string Segment::Enter(const nccl::UniqueId& id, int num_ranks, int rank) {
  int pid = 0;
  int fd = 0;
  unsigned long long nonce = 0;
  if (std::sscanf(TextOf(id).c_str(), kIdFormat, &pid, &fd, &nonce) != 3) {
    return "the unique id is none of ncclGetUniqueId's";
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd_ < 0) return ErrnoText("the process that made the unique id is gone, " + path);
  char target[64] = {};
  if (readlink(path.c_str(), target, sizeof(target) - 1) < 0 ||
      std::string(target).find("tandem-test-nccl") == std::string::npos) {
    return "the unique id is not valid any more";
  }
  void* memory = mmap(nullptr, sizeof(SegmentData), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) return ErrnoText("mmap");
  data_ = static_cast<SegmentData*>(memory);
  int32_t expected = 0;
  if (!data_->num_ranks.compare_exchange_strong(expected, num_ranks) && expected != num_ranks) {
    return "rank " + std::to_string(rank) + " says " + std::to_string(num_ranks) +
           " ranks, another says " + std::to_string(expected);
  }
  flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  Presence absent = Presence::kAbsent;
  if (fcntl(fd_, F_OFD_SETLK, &lock) != 0 ||
      !data_->ranks[rank].presence.compare_exchange_strong(absent, Presence::kThere)) {
    return "rank " + std::to_string(rank) + " exists already in this communicator";
  }
  Announce();
  return "";
}

void Segment::Announce() {
  data_->changes.fetch_add(1);
  syscall(SYS_futex, &data_->changes, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool Segment::WaitFor(const std::function<bool()>& condition,
                      const std::function<bool()>& gives_up) {
  // Between two questions whether to give up; nobody announces the death of a process.
  constexpr timespec kPatience = {0, 2'000'000};
  for (;;) {
    const uint32_t seen = data_->changes.load();
    if (condition()) return true;
    if (gives_up()) return false;
    syscall(SYS_futex, &data_->changes, FUTEX_WAIT, seen, &kPatience, nullptr, 0);
  }
}

bool Segment::IsAlive(int rank) const {
  flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace tandem::testing
