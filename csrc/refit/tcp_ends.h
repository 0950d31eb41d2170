// One sender and its readers over TCP in one process, for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/refit/tcp_link.h"
#include "csrc/testing/status_checks.h"

namespace tandem {

inline LinkGeometry Geometry(int32_t num_readers, int64_t slot_bytes = 5000) {
  LinkGeometry geometry;
  geometry.plan_digest = 0x1234;
  geometry.slot_bytes = slot_bytes;
  geometry.num_slots = 3;
  geometry.num_readers = num_readers;
  geometry.root = 2;
  return geometry;
}

inline Deadline Soon() { return Deadline::In(30); }

// One sender and its readers in this process.
class TcpEnds : public testing::Test {
 protected:
  void Open(const LinkGeometry& geometry, const std::string& host = "127.0.0.1") {
    ASSERT_OK(CreateTcpSendLink(host, 0, geometry, {}, &sender_));
    for (int32_t r = 0; r < geometry.num_readers; ++r) {
      readers_.emplace_back();
      ASSERT_OK(ConnectTcpReceiveLink(sender_->address(), geometry, r, {}, &readers_.back()));
    }
  }
  void Join() {
    std::vector<Status> results(readers_.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < readers_.size(); ++r) {
      threads.emplace_back([this, r, &results] { results[r] = readers_[r]->Join(Soon()); });
    }
    const Status status = sender_->Join(Soon());
    for (std::thread& thread : threads) thread.join();
    ASSERT_OK(status);
    for (const Status& result : results) ASSERT_OK(result);
  }
  void OpenAndJoin(const LinkGeometry& geometry, const std::string& host = "127.0.0.1") {
    ASSERT_NO_FATAL_FAILURE(Open(geometry, host));
    ASSERT_NO_FATAL_FAILURE(Join());
  }
  void Begin(uint64_t epoch) {
    ASSERT_OK(sender_->Begin(epoch, Soon()));
    for (auto& reader : readers_) ASSERT_OK(reader->Begin(epoch, Soon()));
  }
  Status Post(const std::string& text) {
    uint8_t* slot = nullptr;
    const Status status = sender_->Acquire(Soon(), &slot);
    if (!status.ok()) return status;
    std::memcpy(slot, text.data(), text.size());
    return sender_->Post(static_cast<int64_t>(text.size()), Soon());
  }
  // What reader r gets next; an error's message in brackets.
  std::string Take(size_t r) {
    const uint8_t* slot = nullptr;
    int64_t bytes = 0;
    Status status = readers_[r]->Receive(Soon(), &slot, &bytes);
    if (!status.ok()) return "[" + status.message() + "]";
    std::string text(reinterpret_cast<const char*>(slot), static_cast<size_t>(bytes));
    status = readers_[r]->Release();
    return status.ok() ? text : "[" + status.message() + "]";
  }

  std::unique_ptr<SendLink> sender_;
  std::vector<std::unique_ptr<ReceiveLink>> readers_;
};

}  // namespace tandem
