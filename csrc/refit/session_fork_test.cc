// A process that forks while it holds sessions, as a trainer does that starts workers: whatever the
// child does with them, nothing happens but an error, and the parent's refit goes on.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/refit/session.h"
#include "csrc/refit/shm_link.h"
#include "csrc/refit/tcp_link.h"
#include "csrc/testing/refit_problem.h"
#include "csrc/testing/status_checks.h"

namespace tandem {
namespace {

constexpr unsigned kChildSeconds = 20;

class SessionFork : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const LinkGeometry geometry = {plan_.digest, kHeaderBytes + plan_.bucket_bytes, 2, 1, 0};
    std::unique_ptr<SendLink> send;
    std::vector<std::unique_ptr<ReceiveLink>> receive(1);
    if (GetParam() == std::string("shm")) {
      const std::string name = "tandem-session-fork-" + std::to_string(getpid());
      ASSERT_OK(CreateShmSendLink(name, geometry, &send));
      ASSERT_OK(AttachShmReceiveLink(name, geometry, 0, &receive[0]));
    } else {
      ASSERT_OK(CreateTcpSendLink("127.0.0.1", 0, geometry, {}, &send));
      ASSERT_OK(ConnectTcpReceiveLink(send->address(), geometry, 0, {}, &receive[0]));
    }
    const SessionOptions options;
    group_.senders.push_back(std::make_unique<SendSession>(plan_, 0, std::move(send), options));
    group_.receivers.push_back(
        std::make_unique<ReceiveSession>(plan_, 0, std::move(receive), options));
    for (const Status& status : group_.Join()) ASSERT_OK(status);
  }

  // In the child: what it found to be wrong, as an exit code.
  int UseAll() {
    // They take the numbers of files that the fork has closed.
    int files[16];
    for (int& file : files) file = memfd_create("child", 0);
    const Deadline deadline = Deadline::In(1);
    std::vector<uint64_t> digests(plan_.tensors.size());
    const Status answers[] = {
        group_.senders[0]->Join(deadline),          group_.senders[0]->Begin(9, 9, deadline),
        group_.senders[0]->Finish(&digests[0]),     group_.receivers[0]->Join(deadline),
        group_.receivers[0]->Begin(9, 9, deadline), group_.receivers[0]->Finish(&digests[0])};
    for (const Status& answer : answers) {
      if (answer.message().find("belong to the parent") == std::string::npos) return 1;
    }
    group_.senders[0]->Abort({StatusCode::kAborted, 0, -1, "by a child"});
    group_.receivers[0]->Abort({StatusCode::kAborted, kFirstReader, -1, "by a child"});
    if (group_.senders[0]->fault().code != StatusCode::kOk) return 2;
    group_.senders.clear();
    group_.receivers.clear();
    for (const int file : files) {
      struct stat found;
      if (fstat(file, &found) != 0) return 3;
      if (found.st_size != 0) return 4;
    }
    return 0;
  }

  const Plan plan_ = ThreeBuckets();
  RefitGroup group_;
};

TEST_P(SessionFork, AChildCanNeitherUseNorDisturbThem) {
  TensorStore source(plan_);
  std::mt19937_64 random(1);
  source.Fill(&random);
  std::vector<TensorStore> targets(1, TensorStore(plan_));
  // Waits for the sender while the process forks.
  EndResult received;
  std::thread receiver(
      [&] { received = ReceiveAll(plan_, group_.receivers[0].get(), &targets[0], {}); });
  const pid_t child = fork();
  if (child == 0) {
    alarm(kChildSeconds);
    _exit(UseAll());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  const EndResult sent = SendAll(plan_, 0, group_.senders[0].get(), &source, {});
  receiver.join();
  ASSERT_OK(sent.status);
  ASSERT_OK(received.status);
  EXPECT_EQ(sent.digests, received.digests);
}

INSTANTIATE_TEST_SUITE_P(Links, SessionFork, testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tandem
