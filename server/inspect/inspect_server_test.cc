#include "server/inspect/inspect_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/dynamic_message.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/wrappers.pb.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "server/inspect/sample_snapshots.h"
#include "shm/frame_socket.h"

namespace gradsync {
namespace {

using std::chrono::steady_clock;
using std::chrono::system_clock;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kLong{20};

// Blocks whoever passes until it is opened.
class Gate {
 public:
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

class InspectServerTest : public ::testing::Test {
 protected:
  InspectServerTest() {
    std::string pattern = ::testing::TempDir() + "gradsync-XXXXXX";
    directory_ = mkdtemp(pattern.data());
    socket_ = directory_ + "/inspect";
    auto server = InspectServer::Start(
        socket_, [this](steady_clock::time_point deadline) { return source_(deadline); });
    if (server) server_ = std::move(*server);
    channel_ = grpc::CreateChannel("unix:" + socket_, grpc::InsecureChannelCredentials());
    stub_ = v1::Inspect::NewStub(channel_);
  }
  ~InspectServerTest() override {
    server_.reset();
    rmdir(directory_.c_str());
  }
  void SetUp() override { ASSERT_NE(server_, nullptr); }

  grpc::Status ListJobs(v1::ListJobsResponse* response) {
    grpc::ClientContext context;
    context.set_deadline(system_clock::now() + kLong);
    return stub_->ListJobs(&context, {}, response);
  }

  grpc::Status GetJob(const v1::GetJobRequest& request, v1::Job* response) {
    grpc::ClientContext context;
    context.set_deadline(system_clock::now() + kLong);
    return stub_->GetJob(&context, request, response);
  }

  grpc::Status GetJob(const std::string& name, v1::Job* response) {
    v1::GetJobRequest request;
    request.set_name(name);
    return GetJob(request, response);
  }

  // The standard health service's answer for `service`: 1 is SERVING, 2 is NOT_SERVING. Its
  // messages have one field each, and so look like these wrappers on the wire.
  grpc::Status CheckHealth(const std::string& service, int* serving) {
    using google::protobuf::Int32Value;
    using google::protobuf::StringValue;
    grpc::TemplatedGenericStub<StringValue, Int32Value> stub(channel_);
    grpc::ClientContext context;
    context.set_deadline(system_clock::now() + kLong);
    grpc::CompletionQueue queue;
    StringValue request;
    request.set_value(service);
    auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
    call->StartCall();
    Int32Value response;
    grpc::Status status;
    call->Finish(&response, &status, this);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    *serving = response.value();
    return status;
  }

  std::string directory_;
  std::string socket_;
  std::vector<JobSnapshot> jobs_ = {JoiningJob(), TrainingJob()};
  std::function<Result<std::vector<JobSnapshot>>(steady_clock::time_point)> source_ =
      [this](steady_clock::time_point) { return jobs_; };
  std::unique_ptr<InspectServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inspect::Stub> stub_;
};

TEST_F(InspectServerTest, ListsTheJobsInOrder) {
  v1::ListJobsResponse response;
  const grpc::Status status = ListJobs(&response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.jobs_size(), 2);
  EXPECT_EQ(response.jobs(0).name(), "vit");
  EXPECT_EQ(response.jobs(1).name(), "lm-27m");
}

TEST_F(InspectServerTest, ListsNothingWhenThereIsNothing) {
  jobs_.clear();
  v1::ListJobsResponse response;
  EXPECT_TRUE(ListJobs(&response).ok());
  EXPECT_EQ(response.jobs_size(), 0);
}

TEST_F(InspectServerTest, GetsAJobByItsName) {
  v1::Job job;
  const grpc::Status status = GetJob("lm-27m", &job);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(job.summary().name(), "lm-27m");
  EXPECT_EQ(job.groups(0).buckets_size(), 3);
}

TEST_F(InspectServerTest, AnUnknownJobIsNamedAndSoIsWhatToDo) {
  v1::Job job;
  v1::GetJobRequest request;
  request.set_name("lm-27b");
  grpc::Status status = GetJob(request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("'lm-27b'"), HasSubstr("gradsyncctl jobs")));

  request.set_name("lm-27m");
  request.set_generation(3);
  status = GetJob(request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("'lm-27m' in generation 3"));

  request.set_generation(2);
  request.set_uid(5);
  status = GetJob(request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("'lm-27m' of uid 5 in generation 2"));
}

TEST_F(InspectServerTest, ANameThatNoJobCanHaveIsRefused) {
  v1::Job job;
  grpc::Status status = GetJob("", &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("name is empty"));
  status = GetJob(std::string(128, 'x'), &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("at most 127"));
  EXPECT_EQ(GetJob(std::string(127, 'x'), &job).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(InspectServerTest, SeveralJobsOfOneNameMustBeToldApart) {
  JobSnapshot other = TrainingJob();
  other.uid = 1007;
  jobs_.push_back(other);
  other.generation = 3;
  jobs_.push_back(other);
  v1::Job job;
  v1::GetJobRequest request;
  request.set_name("lm-27m");
  grpc::Status status = GetJob(request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(),
              HasSubstr("3 jobs are named 'lm-27m': uid 1000 generation 2, uid 1007 generation 2, "
                        "uid 1007 generation 3"));
  request.set_uid(1007);
  status = GetJob(request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("2 jobs are named 'lm-27m' of uid 1007"));
  request.set_generation(3);
  ASSERT_TRUE(GetJob(request, &job).ok());
  EXPECT_EQ(job.summary().uid(), 1007U);
  EXPECT_EQ(job.summary().generation(), 3U);
}

TEST_F(InspectServerTest, OfAJobThatMetAgainTheNewestIsShown) {
  jobs_[1].age = std::chrono::seconds(100);
  JobSnapshot again = TrainingJob();
  again.age = std::chrono::seconds(5);
  jobs_.push_back(again);
  v1::Job job;
  ASSERT_TRUE(GetJob("lm-27m", &job).ok());
  EXPECT_EQ(job.summary().age().seconds(), 5);
  std::swap(jobs_[1], jobs_[2]);
  ASSERT_TRUE(GetJob("lm-27m", &job).ok());
  EXPECT_EQ(job.summary().age().seconds(), 5);
}

TEST_F(InspectServerTest, ANameThatIsNotUtf8IsFoundAsItIsShown) {
  jobs_[0].job = "vit\xFF";
  v1::ListJobsResponse list;
  ASSERT_TRUE(ListJobs(&list).ok());
  v1::Job job;
  EXPECT_TRUE(GetJob(list.jobs(0).name(), &job).ok());
}

TEST_F(InspectServerTest, TheSourcesErrorsReachTheOperator) {
  const std::vector<std::pair<Code, grpc::StatusCode>> expected = {
      {Code::kDeadlineExceeded, grpc::StatusCode::DEADLINE_EXCEEDED},
      {Code::kShuttingDown, grpc::StatusCode::UNAVAILABLE},
      {Code::kInternal, grpc::StatusCode::INTERNAL},
  };
  for (const auto& [code, grpc_code] : expected) {
    source_ = [code = code](steady_clock::time_point) -> Result<std::vector<JobSnapshot>> {
      return Unexpected(code, "so it is");
    };
    v1::Job job;
    const grpc::Status status = GetJob("vit", &job);
    EXPECT_EQ(status.error_code(), grpc_code);
    EXPECT_EQ(status.error_message(), "so it is");
  }
}

TEST_F(InspectServerTest, TheSourceGetsTheCallersDeadlineButNoLongerOneThanTheLongestCall) {
  steady_clock::time_point seen;
  source_ = [&](steady_clock::time_point deadline) -> Result<std::vector<JobSnapshot>> {
    seen = deadline;
    return jobs_;
  };
  v1::ListJobsResponse response;
  const auto ask = [&](std::function<void(grpc::ClientContext*)> set_deadline) {
    grpc::ClientContext context;
    set_deadline(&context);
    EXPECT_TRUE(stub_->ListJobs(&context, {}, &response).ok());
    return seen;
  };
  auto before = steady_clock::now();
  const auto without = ask([](grpc::ClientContext*) {});
  EXPECT_GE(without, before + kLongestCall);
  EXPECT_LE(without, steady_clock::now() + kLongestCall);

  before = steady_clock::now();
  const auto later = ask([](grpc::ClientContext* context) {
    context->set_deadline(system_clock::now() + std::chrono::hours(1));
  });
  EXPECT_GE(later, before + kLongestCall);
  EXPECT_LE(later, steady_clock::now() + kLongestCall);

  const auto soon = ask([](grpc::ClientContext* context) {
    context->set_deadline(system_clock::now() + std::chrono::seconds(2));
  });
  EXPECT_LE(soon, steady_clock::now() + std::chrono::seconds(3));
}

TEST_F(InspectServerTest, ASourceThatHangsDoesNotHangTheCaller) {
  Gate gate;
  source_ = [&](steady_clock::time_point) {
    gate.Pass();
    return jobs_;
  };
  grpc::ClientContext context;
  context.set_deadline(system_clock::now() + std::chrono::milliseconds(50));
  v1::ListJobsResponse response;
  EXPECT_EQ(stub_->ListJobs(&context, {}, &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  gate.Open();
}

TEST_F(InspectServerTest, TooManyCallsAtOnceAreRefusedAndHealthStillAnswers) {
  Gate gate;
  source_ = [&](steady_clock::time_point) {
    gate.Pass();
    return jobs_;
  };
  std::promise<void> refused;
  std::once_flag once;
  std::vector<std::future<grpc::StatusCode>> calls;
  for (int i = 0; i < 12; ++i) {
    calls.push_back(std::async(std::launch::async, [&] {
      v1::ListJobsResponse response;
      const auto code = ListJobs(&response).error_code();
      if (code != grpc::StatusCode::OK) std::call_once(once, [&] { refused.set_value(); });
      return code;
    }));
  }
  refused.get_future().wait();
  int serving = 0;
  EXPECT_TRUE(CheckHealth("gradsync.v1.Inspect", &serving).ok());
  EXPECT_EQ(serving, 1);
  gate.Open();
  int served = 0;
  for (auto& call : calls) {
    const grpc::StatusCode code = call.get();
    if (code == grpc::StatusCode::OK) {
      ++served;
    } else {
      EXPECT_EQ(code, grpc::StatusCode::RESOURCE_EXHAUSTED);
    }
  }
  EXPECT_GT(served, 0);
  v1::ListJobsResponse response;
  grpc::Status status;
  do {  // until gRPC has taken its threads back
    status = ListJobs(&response);
  } while (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(InspectServerTest, AnOversizedRequestIsRefused) {
  v1::Job job;
  EXPECT_EQ(GetJob(std::string(1 << 20, 'x'), &job).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(GetJob("vit", &job).ok());
}

TEST_F(InspectServerTest, BytesThatAreNotGrpcEndThatConnectionOnly) {
  auto client = ConnectTo(socket_, SOCK_STREAM);
  ASSERT_TRUE(client);
  const std::string noise(4096, '\xA5');
  ASSERT_GT(send(client->get(), noise.data(), noise.size(), MSG_NOSIGNAL), 0);
  pollfd entry{client->get(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&entry, 1, 20000), 1);
  v1::Job job;
  EXPECT_TRUE(GetJob("vit", &job).ok());
}

TEST_F(InspectServerTest, HealthSaysServingForTheWholeAndForInspect) {
  for (const char* service : {"", "gradsync.v1.Inspect"}) {
    int serving = 0;
    const grpc::Status status = CheckHealth(service, &serving);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(serving, 1) << service;
  }
  int serving = 0;
  EXPECT_EQ(CheckHealth("gradsync.v1.Nothing", &serving).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(InspectServerTest, WhileDrainingHealthSaysSoAndCallsAreUnavailable) {
  server_->Drain();
  for (const char* service : {"", "gradsync.v1.Inspect"}) {
    int serving = 0;
    EXPECT_TRUE(CheckHealth(service, &serving).ok());
    EXPECT_EQ(serving, 2) << service;
  }
  v1::ListJobsResponse response;
  const grpc::Status status = ListJobs(&response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("shutting down"));
}

// One exchange with the reflection service, both messages in protobuf's text format. The reflection
// library has the messages' descriptors, but no headers.
std::string AskReflection(const std::shared_ptr<grpc::Channel>& channel, const std::string& text) {
  using google::protobuf::DescriptorPool;
  google::protobuf::DynamicMessageFactory factory;
  const auto make = [&factory](const char* name) -> std::unique_ptr<google::protobuf::Message> {
    const auto* type = DescriptorPool::generated_pool()->FindMessageTypeByName(name);
    if (type == nullptr) return nullptr;
    return std::unique_ptr<google::protobuf::Message>(factory.GetPrototype(type)->New());
  };
  const auto request = make("grpc.reflection.v1alpha.ServerReflectionRequest");
  const auto response = make("grpc.reflection.v1alpha.ServerReflectionResponse");
  if (request == nullptr || response == nullptr) return "no reflection library";
  if (!google::protobuf::TextFormat::ParseFromString(text, request.get())) return "bad request";

  grpc::ClientContext context;
  context.set_deadline(system_clock::now() + kLong);
  grpc::CompletionQueue queue;
  const auto step = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  grpc::GenericStub stub(channel);
  const auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  call->StartCall(nullptr);
  if (!step()) return "no call";
  const grpc::Slice out(request->SerializeAsString());
  call->Write(grpc::ByteBuffer(&out, 1), nullptr);
  if (!step()) return "no write";
  grpc::ByteBuffer in;
  call->Read(&in, nullptr);
  if (!step()) return "no answer";
  call->WritesDone(nullptr);
  step();
  grpc::Status status;
  call->Finish(&status, nullptr);
  step();
  grpc::Slice slice;
  if (!in.DumpToSingleSlice(&slice).ok()) return "no slice";
  response->ParseFromArray(slice.begin(), static_cast<int>(slice.size()));
  return response->DebugString();
}

TEST_F(InspectServerTest, ReflectionListsTheServices) {
  EXPECT_THAT(AskReflection(channel_, "list_services: ''"),
              AllOf(HasSubstr("\"gradsync.v1.Inspect\""), HasSubstr("\"grpc.health.v1.Health\"")));
}

TEST_F(InspectServerTest, ReflectionDescribesInspect) {
  EXPECT_THAT(AskReflection(channel_, "file_containing_symbol: 'gradsync.v1.Inspect'"),
              AllOf(HasSubstr("inspect.proto"), HasSubstr("GetJobRequest")));
}

TEST_F(InspectServerTest, EndsWhileAClientStaysConnected) {
  v1::ListJobsResponse response;
  ASSERT_TRUE(ListJobs(&response).ok());
  server_.reset();
  EXPECT_NE(access(socket_.c_str(), F_OK), 0);
  EXPECT_EQ(ListJobs(&response).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(InspectServerTest, ASocketThatIsTakenIsAnError) {
  auto second = InspectServer::Start(socket_, source_);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Code::kAlreadyExists);
}

}  // namespace
}  // namespace gradsync
