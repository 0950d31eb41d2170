// A point in time after which a wait must end. Every function of the transport that can wait takes
// one; none waits without.
#pragma once

#include <chrono>
#include <cstdint>

namespace tandem {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(Clock::time_point end) : end_(end) {}
  static Deadline In(double seconds) {
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(seconds)));
  }

  bool HasPassed() const { return Clock::now() >= end_; }
  Clock::time_point end() const { return end_; }
  // What is left, at least 0.
  double Seconds() const {
    const double left = std::chrono::duration<double>(end_ - Clock::now()).count();
    return left > 0 ? left : 0;
  }

 private:
  Clock::time_point end_;
};

}  // namespace tandem
