// The functions of namespace simt that device code of csrc/common/simt.h writes in PTX or with
// instructions of the device only, in plain C++.
#pragma once

#include <cmath>

namespace simt {

// 2^x; results below 2^-126 are 0, as ex2.approx.ftz gives them.
inline float Exp2(float x) {
  constexpr float kSmallestNormal = 1.17549435e-38f;
  const float result = std::exp2(x);
  return result < kSmallestNormal ? 0.0f : result;  // a NaN stays
}

}  // namespace simt
