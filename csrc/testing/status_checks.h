// Checks of a Status in tests, with its message where they fail.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "csrc/common/status.h"

#define ASSERT_OK(expression)                       \
  do {                                              \
    const Status status_ = (expression);            \
    ASSERT_TRUE(status_.ok()) << status_.message(); \
  } while (false)

#define EXPECT_FAILS(expression, expected_code, expected_text)                                \
  do {                                                                                        \
    const Status status_ = (expression);                                                      \
    EXPECT_EQ(status_.code(), StatusCode::expected_code) << status_.message();                \
    EXPECT_NE(status_.message().find(expected_text), std::string::npos) << status_.message(); \
  } while (false)
