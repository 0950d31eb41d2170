// A refit for tests: random tensors of a plan on the sender's side, memory for each reader, and a
// run of all ends in threads.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/refit/plan.h"
#include "csrc/refit/session.h"
#include "csrc/testing/deferred_executor.h"
#include "csrc/testing/loopback_link.h"

namespace tandem {

inline std::string TensorName(int64_t i) { return std::string("t").append(std::to_string(i)); }

// The tensors of a plan in memory, each of a type of its own.
class TensorStore {
 public:
  TensorStore(const Plan& plan, const std::vector<WireType>& types) : types_(types) {
    for (size_t i = 0; i < plan.tensors.size(); ++i) {
      const TensorEntry& entry = plan.tensors[i];
      const int64_t numel = entry.bytes() / SizeOf(entry.type);
      memory_.emplace_back(static_cast<size_t>(numel * SizeOf(types[i])));
    }
  }
  explicit TensorStore(const Plan& plan) : TensorStore(plan, WireTypes(plan)) {}

  static std::vector<WireType> WireTypes(const Plan& plan) {
    std::vector<WireType> types;
    for (const TensorEntry& entry : plan.tensors) types.push_back(entry.type);
    return types;
  }

  void Fill(std::mt19937_64* random) {
    for (std::vector<uint8_t>& bytes : memory_) {
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((*random)());
    }
  }

  std::vector<uint8_t>& operator[](size_t i) { return memory_[i]; }
  const std::vector<uint8_t>& operator[](size_t i) const { return memory_[i]; }
  WireType type(size_t i) const { return types_[i]; }

  // What a session wants for one bucket.
  std::vector<TensorMemory> Of(const Plan& plan, int64_t bucket) {
    const Bucket& entry = plan.buckets[static_cast<size_t>(bucket)];
    std::vector<TensorMemory> result;
    for (int64_t i = entry.first_piece; i < entry.first_piece + entry.num_pieces; ++i) {
      const auto tensor = static_cast<size_t>(plan.pieces[static_cast<size_t>(i)].tensor);
      result.push_back({memory_[tensor].data(), types_[tensor]});
    }
    return result;
  }

 private:
  std::vector<WireType> types_;
  std::vector<std::vector<uint8_t>> memory_;
};

struct EndResult {
  Status status;
  std::vector<uint64_t> digests;
};

struct RefitCall {
  uint64_t epoch = 1;
  uint64_t version = 1;
  double timeout_s = 20;
};

inline EndResult SendAll(const Plan& plan, int32_t root, SendSession* session, TensorStore* store,
                         const RefitCall& call) {
  EndResult result{OkStatus(), std::vector<uint64_t>(plan.tensors.size())};
  result.status = session->Begin(call.epoch, call.version, Deadline::In(call.timeout_s));
  for (size_t b = 0; result.status.ok() && b < plan.buckets.size(); ++b) {
    if (plan.buckets[b].root != root) continue;
    const auto bucket = static_cast<int64_t>(b);
    result.status = session->Send(bucket, store->Of(plan, bucket).data());
  }
  if (result.status.ok()) result.status = session->Finish(result.digests.data());
  return result;
}

inline EndResult ReceiveAll(const Plan& plan, ReceiveSession* session, TensorStore* store,
                            const RefitCall& call) {
  EndResult result{OkStatus(), std::vector<uint64_t>(plan.tensors.size())};
  result.status = session->Begin(call.epoch, call.version, Deadline::In(call.timeout_s));
  for (size_t b = 0; result.status.ok() && b < plan.buckets.size(); ++b) {
    const auto bucket = static_cast<int64_t>(b);
    result.status = session->Receive(bucket, store->Of(plan, bucket).data());
  }
  if (result.status.ok()) result.status = session->Finish(result.digests.data());
  return result;
}

// All ends of a transfer in one process, over loopback links or whatever `links` makes.
class RefitGroup {
 public:
  std::vector<std::unique_ptr<SendSession>> senders;
  std::vector<std::unique_ptr<ReceiveSession>> receivers;

  // One status per end, senders first.
  std::vector<Status> Join(double timeout_s = 20) {
    std::vector<Status> statuses(senders.size() + receivers.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < senders.size(); ++i) {
      threads.emplace_back([&, i] { statuses[i] = senders[i]->Join(Deadline::In(timeout_s)); });
    }
    for (size_t i = 0; i < receivers.size(); ++i) {
      threads.emplace_back(
          [&, i] { statuses[senders.size() + i] = receivers[i]->Join(Deadline::In(timeout_s)); });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  struct Results {
    std::vector<EndResult> senders;
    std::vector<EndResult> receivers;
  };
  Results Run(const Plan& plan, TensorStore* source, std::vector<TensorStore>* targets,
              const RefitCall& send_call, const RefitCall& receive_call) {
    Results results;
    results.senders.resize(senders.size());
    results.receivers.resize(receivers.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < senders.size(); ++i) {
      threads.emplace_back([&, i] {
        results.senders[i] =
            SendAll(plan, static_cast<int32_t>(i), senders[i].get(), source, send_call);
      });
    }
    for (size_t i = 0; i < receivers.size(); ++i) {
      threads.emplace_back([&, i] {
        results.receivers[i] = ReceiveAll(plan, receivers[i].get(), &(*targets)[i], receive_call);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }
};

inline Plan MakePlan(std::vector<TensorEntry> tensors, int64_t bucket_bytes,
                     int32_t num_roots = 1) {
  Plan plan;
  const Status status = BuildPlan(std::move(tensors), bucket_bytes, num_roots, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

struct GroupOptions {
  int32_t num_readers = 1;
  int32_t num_slots = 2;
  bool sender_digests = true;
  bool receiver_digests = true;
  std::function<void(int64_t post, uint8_t* slot, int64_t* bytes)> spoil;
};

// `executors`: one per end, senders first; empty: the host.
inline RefitGroup MakeGroup(const Plan& plan, const GroupOptions& options,
                            std::vector<DeferredExecutor>* executors = nullptr) {
  RefitGroup group;
  std::vector<std::vector<std::unique_ptr<ReceiveLink>>> wires(
      static_cast<size_t>(options.num_readers));
  for (int32_t root = 0; root < plan.num_roots; ++root) {
    LoopbackOptions link;
    link.geometry = {plan.digest, kHeaderBytes + plan.bucket_bytes, options.num_slots,
                     options.num_readers, root};
    link.spoil = options.spoil;
    if (executors != nullptr) {  // one reader, so that each end has an executor of its own
      link.send_executor = &(*executors)[static_cast<size_t>(2 * root)];
      link.receive_executor = &(*executors)[static_cast<size_t>(2 * root + 1)];
    }
    LoopbackEnds ends = MakeLoopback(std::move(link));
    group.senders.push_back(std::make_unique<SendSession>(plan, root, std::move(ends.sender),
                                                          SessionOptions{options.sender_digests}));
    for (size_t i = 0; i < wires.size(); ++i) wires[i].push_back(std::move(ends.readers[i]));
  }
  for (size_t i = 0; i < wires.size(); ++i) {
    group.receivers.push_back(
        std::make_unique<ReceiveSession>(plan, static_cast<int32_t>(i), std::move(wires[i]),
                                         SessionOptions{options.receiver_digests}));
  }
  for (const Status& status : group.Join()) EXPECT_TRUE(status.ok()) << status.message();
  return group;
}

// Four tensors in three buckets of 4096 bytes.
inline Plan ThreeBuckets() {
  return MakePlan({{"first", WireType::kFloat32, {1000}},
                   {"second", WireType::kFloat32, {500}},
                   {"third", WireType::kFloat32, {400}},
                   {"fourth", WireType::kFloat32, {1000}}},
                  4096);
}

}  // namespace tandem
