// Files that belong to this process alone: a forked child closes them right after the fork (a lock
// that belongs to an open file would otherwise outlive the process that took it for as long as the
// child lives), and a program that is executed never sees them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace tandem {

// As open(2), with O_CLOEXEC; -1 and errno on failure.
int OpenUnforked(const std::string& path, int flags, mode_t mode);
// The same for a file that is open already, a socket for instance.
void KeepUnforked(int file);
void CloseUnforked(int file);
// How many forks this process is away from the one that called any of these first.
uint32_t NumForks();

}  // namespace tandem
