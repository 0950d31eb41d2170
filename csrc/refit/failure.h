// A Status of any code with a formatted message.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "csrc/common/status.h"

namespace tandem {

[[gnu::format(printf, 2, 3)]] inline Status Failure(StatusCode code, const char* format, ...) {
  char buffer[480];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof(buffer), format, arguments);
  va_end(arguments);
  return Status(code, buffer);
}

}  // namespace tandem
