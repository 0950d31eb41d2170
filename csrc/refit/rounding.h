// Rounding to a narrow float in double precision, for tests: an independent statement of what the
// bit tricks of the kernels must give.
#pragma once

#include <cmath>
#include <limits>

namespace tandem {

// A binary format: digits of the significand (the hidden one included), exponent of the smallest
// normal, largest finite value.
struct FloatFormat {
  int digits;
  int min_exponent;
  double max;
};

inline constexpr FloatFormat kBFloat16Format = {8, -126, 3.3895313892515355e38};
inline constexpr FloatFormat kFloat16Format = {11, -14, 65504.0};
inline constexpr FloatFormat kE4M3Format = {4, -6, 448.0};

// The nearest value of the format, ties to even; infinity beyond its largest.
inline double RoundTo(double value, const FloatFormat& format) {
  if (value == 0.0 || !std::isfinite(value)) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  exponent = std::fmax(exponent - 1, format.min_exponent);
  const double unit = std::ldexp(1.0, exponent - (format.digits - 1));
  const double rounded = std::nearbyint(value / unit) * unit;
  const double infinity = std::copysign(std::numeric_limits<double>::infinity(), value);
  return std::fabs(rounded) > format.max ? infinity : rounded;
}

// What a code of float8 e4m3 stands for.
inline double DecodeE4M3(unsigned code) {
  const unsigned exponent = code >> 3 & 15;
  const unsigned mantissa = code & 7;
  const double sign = code & 0x80 ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8.0 + mantissa, static_cast<int>(exponent) - 10);
}

}  // namespace tandem
