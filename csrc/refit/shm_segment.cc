#include "csrc/refit/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "csrc/refit/failure.h"
#include "csrc/refit/fork_guard.h"

namespace tandem {
namespace {

constexpr char kFolder[] = "/dev/shm/";
constexpr uint64_t kMagic = 0x31304d4853444e54;  // "TNDSHM01"
constexpr int kMaxTakeovers = 8;                 // of a name that other starters fight for
constexpr int64_t kMiB = 1 << 20;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

// Where the parts of a segment begin.
struct Layout {
  int64_t records = 0;
  int64_t slot_records = 0;
  int64_t slots = 0;
  int64_t slot_stride = 0;
  int64_t total = 0;

  explicit Layout(const LinkGeometry& geometry) {
    records = RoundUp(sizeof(SegmentHeader), alignof(EndRecord));
    slot_records = RoundUp(records + (1 + geometry.num_readers) * sizeof(EndRecord), 64);
    slots = RoundUp(slot_records + geometry.num_slots * sizeof(SlotRecord), kSlotAlignment);
    slot_stride = RoundUp(geometry.slot_bytes, kSlotAlignment);
    total = slots + slot_stride * geometry.num_slots;
  }
};

Status CheckName(const std::string& name) {
  const bool is_name = !name.empty() && name.size() <= 200 && name != "." && name != ".." &&
                       name.find('/') == std::string::npos;
  if (is_name) return OkStatus();
  return Failure(StatusCode::kInvalidArgument,
                 "a segment's name has 1 to 200 characters and no slash, got \"%.100s\"",
                 name.c_str());
}

bool LockByte(int file, int64_t byte) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return fcntl(file, F_OFD_SETLK, &lock) == 0;
}

bool IsSameFile(int file, const std::string& path) {
  struct stat opened;
  struct stat named;
  return fstat(file, &opened) == 0 && lstat(path.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

// Reserves the pages now: without them the first write to a full file system ends the process.
Status Reserve(int file, const LinkGeometry& geometry) {
  const int64_t bytes = Layout(geometry).total;
  int error = EINTR;
  for (int i = 0; i < 100 && error == EINTR; ++i) error = posix_fallocate(file, 0, bytes);
  if (error == 0) return OkStatus();
  struct statvfs found = {};
  statvfs(kFolder, &found);
  return Failure(StatusCode::kUnavailable,
                 "%s has %lld MiB free, the refit needs %lld MiB (%d slots of %.2f MiB): %s; lower "
                 "policy.generation.refit_cfg.bucket_mib, enlarge the shared memory, or set "
                 "policy.generation.refit_cfg.transport=tcp",
                 kFolder, static_cast<long long>(found.f_bavail * found.f_frsize / kMiB),
                 static_cast<long long>((bytes + kMiB - 1) / kMiB), geometry.num_slots,
                 static_cast<double>(geometry.slot_bytes) / kMiB, strerror(error));
}

// Removes the file of that name if nobody holds its sender's byte. The byte is held meanwhile, so
// of several starters one removes it, and none removes what another has made since.
Status RemoveLeftover(const std::string& path) {
  const File file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file.get() < 0) {
    if (errno == ENOENT) return OkStatus();
    return Failure(StatusCode::kUnavailable, "cannot open the leftover %s: %s; remove it",
                   path.c_str(), strerror(errno));
  }
  if (!LockByte(file.get(), 0)) {
    return Failure(StatusCode::kUnavailable,
                   "%s belongs to a living process; each link needs a name of its own",
                   path.c_str());
  }
  if (IsSameFile(file.get(), path)) unlink(path.c_str());
  return OkStatus();
}

// Gives an unnamed file its name, in place of a leftover.
Status GiveName(int file, const std::string& path) {
  const std::string source = "/proc/self/fd/" + std::to_string(file);
  for (int i = 0; i < kMaxTakeovers; ++i) {
    if (linkat(AT_FDCWD, source.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      return OkStatus();
    }
    if (errno != EEXIST) {
      return Failure(StatusCode::kUnavailable, "cannot create %s: %s", path.c_str(),
                     strerror(errno));
    }
    if (Status status = RemoveLeftover(path); !status.ok()) return status;
  }
  return Failure(StatusCode::kUnavailable, "%s is taken again and again by others", path.c_str());
}

}  // namespace

ShmSegment& ShmSegment::operator=(ShmSegment&& other) noexcept {
  if (this == &other) return *this;
  Close();
  name_ = std::move(other.name_);
  file_ = std::exchange(other.file_, -1);
  has_name_ = std::exchange(other.has_name_, false);
  forks_ = other.forks_;
  end_ = other.end_;
  bytes_ = other.bytes_;
  base_ = std::exchange(other.base_, nullptr);
  records_ = other.records_;
  slot_records_ = other.slot_records_;
  slots_ = other.slots_;
  slot_stride_ = other.slot_stride_;
  return *this;
}

Status ShmSegment::Create(const std::string& name, const LinkGeometry& geometry,
                          ShmSegment* segment) {
  if (Status status = CheckName(name); !status.ok()) return status;
  if (Status status = CheckGeometry(geometry); !status.ok()) return status;
  ShmSegment made;
  made.name_ = name;
  made.file_ = OpenUnforked(kFolder, O_TMPFILE | O_RDWR, 0600);
  if (made.file_ < 0) {
    return Failure(StatusCode::kUnavailable, "cannot create a file in %s: %s", kFolder,
                   strerror(errno));
  }
  if (Status status = Reserve(made.file_, geometry); !status.ok()) return status;
  const Layout layout(geometry);
  if (Status status = made.Map(layout.total); !status.ok()) return status;
  SegmentHeader* header = new (made.base_) SegmentHeader();
  header->total_bytes = layout.total;
  header->geometry = geometry;
  header->magic = kMagic;
  made.FindParts(geometry);
  if (Status status = made.TakeEnd(0); !status.ok()) return status;
  if (Status status = GiveName(made.file_, kFolder + name); !status.ok()) return status;
  made.has_name_ = true;
  *segment = std::move(made);
  return OkStatus();
}

Status ShmSegment::Attach(const std::string& name, int32_t reader, ShmSegment* segment) {
  if (Status status = CheckName(name); !status.ok()) return status;
  const std::string path = kFolder + name;
  ShmSegment found;
  found.name_ = name;
  found.file_ = OpenUnforked(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0);
  struct stat status_of_file = {};
  if (found.file_ < 0 || fstat(found.file_, &status_of_file) != 0) {
    return Failure(StatusCode::kUnavailable,
                   "reader %d finds no segment %s (%s): its sender is on another host, has closed "
                   "it, or has all its readers already",
                   reader, path.c_str(), strerror(errno));
  }
  const int64_t size = status_of_file.st_size;
  if (!S_ISREG(status_of_file.st_mode) || size < static_cast<int64_t>(sizeof(SegmentHeader))) {
    return Failure(StatusCode::kMismatch, "%s is not a segment of a refit", path.c_str());
  }
  if (Status status = found.Map(size); !status.ok()) return status;
  const SegmentHeader& header = found.header();
  if (header.magic != kMagic || !CheckGeometry(header.geometry).ok() ||
      header.total_bytes != size || Layout(header.geometry).total != size) {
    return Failure(StatusCode::kMismatch, "%s (%lld bytes) is not a segment of this version",
                   path.c_str(), static_cast<long long>(size));
  }
  if (reader < 0 || reader >= header.geometry.num_readers) {
    return Failure(StatusCode::kMismatch, "num_readers of %s is %d, there is no reader %d",
                   path.c_str(), header.geometry.num_readers, reader);
  }
  found.FindParts(header.geometry);
  if (Status status = found.TakeEnd(1 + reader); !status.ok()) return status;
  *segment = std::move(found);
  return OkStatus();
}

Status ShmSegment::Map(int64_t bytes) {
  // Populated: no page fault later. Not in children: they would keep the memory alive.
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, 0);
  if (memory == MAP_FAILED) {
    return Failure(StatusCode::kUnavailable, "cannot map %lld MiB of shared memory: %s",
                   static_cast<long long>(bytes / kMiB), strerror(errno));
  }
  madvise(memory, bytes, MADV_DONTFORK);
  bytes_ = bytes;
  base_ = static_cast<uint8_t*>(memory);
  return OkStatus();
}

void ShmSegment::FindParts(const LinkGeometry& geometry) {
  const Layout layout(geometry);
  records_ = reinterpret_cast<EndRecord*>(base_ + layout.records);
  slot_records_ = reinterpret_cast<SlotRecord*>(base_ + layout.slot_records);
  slots_ = base_ + layout.slots;
  slot_stride_ = layout.slot_stride;
}

Status ShmSegment::TakeEnd(int32_t end) {
  end_ = end;
  EndRecord& own = record(end);
  if (!LockByte(file_, end)) {
    if (errno != EAGAIN && errno != EACCES) {
      return Failure(StatusCode::kUnavailable, "cannot lock a byte of /dev/shm/%s: %s",
                     name_.c_str(), strerror(errno));
    }
    return Failure(StatusCode::kUnavailable, "reader %d of %s is process %d already", end - 1,
                   name_.c_str(), own.process.load());
  }
  Presence expected = Presence::kAbsent;
  if (!own.presence.compare_exchange_strong(expected, Presence::kAttached)) {
    return Failure(StatusCode::kUnavailable,
                   "reader %d of %s was process %d, which has gone; a refit that lost a reader "
                   "needs new links",
                   end - 1, name_.c_str(), own.process.load());
  }
  own.process.store(getpid());
  return OkStatus();
}

bool ShmSegment::is_mine() const { return base_ != nullptr && forks_ == NumForks(); }

bool ShmSegment::IsHeld(int32_t end) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = end;
  lock.l_len = 1;
  return fcntl(file_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void ShmSegment::Unlink() {
  if (!std::exchange(has_name_, false)) return;
  const std::string path = kFolder + name_;
  if (IsSameFile(file_, path)) unlink(path.c_str());
}

void ShmSegment::Close() {
  if (forks_ != NumForks()) {  // the parent's: file and memory are gone here already
    base_ = nullptr;
    file_ = -1;
  }
  if (file_ >= 0) {
    Unlink();
    CloseUnforked(std::exchange(file_, -1));
  }
  if (base_ != nullptr) munmap(base_, bytes_);
  base_ = nullptr;
}

}  // namespace tandem
