// The outcome of a check or a run. `core` knows neither exceptions nor XLA's error type.
#pragma once

#include <string>
#include <utility>

namespace jax_fmha {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // the caller's mistake: ValueError
  kUnimplemented,    // a valid call that no kernel takes: NotImplementedError
  kInternal,         // neither: RuntimeError
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status InvalidArgument(std::string message) {
    return Status(StatusCode::kInvalidArgument, std::move(message));
  }
  static Status Unimplemented(std::string message) {
    return Status(StatusCode::kUnimplemented, std::move(message));
  }
  static Status Internal(std::string message) {
    return Status(StatusCode::kInternal, std::move(message));
  }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace jax_fmha
