// A streaming chat with Quire in C++: deadline, retries, resuming after a lost gateway, typed errors.
//
//   quire_chat HOST:PORT[,HOST:PORT...] PROMPT [MAX_TOKENS]
//
// Several addresses: where one gateway is lost, the stream is read on at the next, from the tokens that are here already.

#include <chrono>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "protos/inference/v1/inference.grpc.pb.h"

namespace v1 = quire::inference::v1;

namespace {

// gRPC itself retries connections that break before the first message; nothing is generated twice.
constexpr char kServiceConfig[] = R"({"methodConfig": [{
  "name": [{"service": "quire.inference.v1.InferenceService"}],
  "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 3,
                  "retryableStatusCodes": ["UNAVAILABLE"]}}]})";

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::unique_ptr<v1::InferenceService::Stub> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(kServiceConfig);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
  return v1::InferenceService::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
}

std::string NewRequestId() {
  std::random_device random;
  std::ostringstream id;
  id << "cpp-" << std::hex << random() << random() << random();
  return id.str();
}

// What has been read of one request; enough to read it on elsewhere.
class Reader {
 public:
  explicit Reader(std::string request_id) : request_id_(std::move(request_id)) {}

  v1::ResumeRequest Resume() const {
    v1::ResumeRequest request;
    request.set_request_id(request_id_);
    for (const auto& [choice, offset] : num_tokens_) {
      auto* position = request.add_positions();
      position->set_choice(choice);
      position->set_token_offset(offset);
    }
    return request;
  }

  bool is_started() const { return is_started_; }
  bool is_complete() const { return is_complete_; }

  // Prints what is new.
  void Take(const v1::GenerateEvent& event) {
    switch (event.event_case()) {
      case v1::GenerateEvent::kStarted:
        is_started_ = true;
        break;
      case v1::GenerateEvent::kDelta:
        std::cout << event.delta().text() << std::flush;
        Count(event.delta());
        break;
      case v1::GenerateEvent::kReasoningDelta:
        std::cout << event.reasoning_delta().text() << std::flush;
        Count(event.reasoning_delta());
        break;
      case v1::GenerateEvent::kToolCallDelta:
        std::cout << event.tool_call_delta().name() << event.tool_call_delta().arguments() << std::flush;
        Count(event.tool_call_delta());
        break;
      case v1::GenerateEvent::kUsage:
        is_complete_ = true;
        std::cout << "\n[" << event.usage().prompt_tokens() << " prompt + " << event.usage().completion_tokens()
                  << " output tokens, waited " << event.usage().timing().queue_ms() << " ms]" << std::endl;
        break;
      default:
        break;
    }
  }

 private:
  template <typename AnyDelta>
  void Count(const AnyDelta& delta) {
    num_tokens_[delta.choice()] = delta.token_offset() + delta.token_ids_size();
  }

  const std::string request_id_;
  std::map<uint32_t, uint32_t> num_tokens_;
  bool is_started_ = false;
  bool is_complete_ = false;
};

std::string Trailer(const grpc::ClientContext& context, const std::string& name) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find(name);
  return found == trailers.end() ? "" : std::string(found->second.data(), found->second.size());
}

// The stable reason, and when to try again, come as trailers of text; all details are in grpc-status-details-bin.
void Explain(const grpc::Status& status, const grpc::ClientContext& context) {
  std::cerr << "error " << status.error_code() << " " << Trailer(context, "x-error-reason") << ": "
            << status.error_message() << std::endl;
  const std::string retry_ms = Trailer(context, "x-retry-after-ms");
  if (!retry_ms.empty()) std::cerr << "try again in " << retry_ms << " ms" << std::endl;
}

v1::ChatRequest NewRequest(const std::string& prompt, unsigned max_tokens) {
  v1::ChatRequest request;
  auto* message = request.add_messages();
  message->set_role("user");
  message->set_content(prompt);
  request.mutable_stop()->set_max_tokens(max_tokens);
  request.set_resumable(true);
  return request;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: quire_chat HOST:PORT[,HOST:PORT...] PROMPT [MAX_TOKENS]" << std::endl;
    return 2;
  }
  const std::vector<std::string> addresses = Split(argv[1]);
  const v1::ChatRequest request = NewRequest(argv[2], argc > 3 ? std::stoul(argv[3]) : 100);
  const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(60);
  const std::string request_id = NewRequestId();
  Reader reader(request_id);

  for (size_t attempt = 0; attempt < 2 * addresses.size(); ++attempt) {
    const auto stub = Connect(addresses[attempt % addresses.size()]);
    grpc::ClientContext context;
    context.set_deadline(deadline);
    context.AddMetadata("idempotency-key", request_id);  // sent again, it attaches to the request that runs already
    const auto stream =
        reader.is_started() ? stub->Resume(&context, reader.Resume()) : stub->ChatStream(&context, request);
    for (v1::GenerateEvent event; stream->Read(&event);) reader.Take(event);
    const grpc::Status status = stream->Finish();
    if (status.ok() && reader.is_complete()) return 0;
    const bool is_gateway_lost = status.error_code() == grpc::StatusCode::UNAVAILABLE;
    if (!is_gateway_lost || attempt + 1 == 2 * addresses.size()) {
      Explain(status, context);
      return 1;
    }
  }
  return 1;
}
