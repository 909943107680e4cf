#include "server/inspect/inspect_server.h"

#include <chrono>
#include <mutex>
#include <utility>

#include "absl/strings/escaping.h"
#include "grpc/grpc.h"
#include "grpc/support/log.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/server_posix.h"
#include "spdlog/spdlog.h"

namespace gradsync {
namespace {

// Operators' questions are few and small; nothing here may take much from the trainers' node.
constexpr int kMaxThreads = 8;
constexpr int kMaxPollers = 2;
constexpr int kMaxStreamsPerConnection = 16;
constexpr int kMaxRequestBytes = 16 * 1024;

// How long calls may go on when the server is destroyed.
constexpr std::chrono::milliseconds kGrace{100};

void LogFromGrpc(gpr_log_func_args* args) {
  const bool error = args->severity == GPR_LOG_SEVERITY_ERROR;
  spdlog::log(error ? spdlog::level::warn : spdlog::level::debug, "event=grpc message=\"{}\"",
              absl::Utf8SafeCEscape(args->message));
}

// What gRPC keeps for the process. The reference that grpc_init takes is never given back: gRPC's
// own shutdown can wait 10 s for a poller of a write that was slow, and a daemon has to end at
// once.
void SetUpGrpc() {
  static std::once_flag once;
  std::call_once(once, [] {
    gpr_set_log_function(&LogFromGrpc);
    grpc_init();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

std::unique_ptr<grpc::Server> StartGrpc(grpc::Service* service) {
  grpc::ResourceQuota quota("inspect");
  quota.SetMaxThreads(kMaxThreads);
  grpc::ServerBuilder builder;
  builder.SetResourceQuota(quota)
      .SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1)
      .SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1)
      .SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, kMaxPollers)
      .AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection)
      .SetMaxReceiveMessageSize(kMaxRequestBytes)
      .RegisterService(service);
  return builder.BuildAndStart();
}

}  // namespace

Result<std::unique_ptr<InspectServer>> InspectServer::Start(const std::string& socket,
                                                            SnapshotSource source) {
  SetUpGrpc();
  std::unique_ptr<InspectServer> server(new InspectServer(std::move(source)));
  server->server_ = StartGrpc(&server->service_);
  if (server->server_ == nullptr) return Unexpected(Code::kInternal, "cannot start gRPC");
  server->server_->GetHealthCheckService()->SetServingStatus(v1::Inspect::service_full_name(),
                                                             true);
  auto acceptor = Acceptor::Start(socket, [grpc = server->server_.get()](UniqueFd connection) {
    grpc::AddInsecureChannelFromFd(grpc, connection.Release());
  });
  if (!acceptor) return Unexpected(acceptor.error());
  server->acceptor_ = std::move(*acceptor);
  return server;
}

InspectServer::InspectServer(SnapshotSource source) : service_(std::move(source)) {}

InspectServer::~InspectServer() {
  acceptor_.reset();  // first: it hands connections to the server
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + kGrace);
}

void InspectServer::Drain() {
  service_.Drain();
  server_->GetHealthCheckService()->Shutdown();
}

}  // namespace gradsync
