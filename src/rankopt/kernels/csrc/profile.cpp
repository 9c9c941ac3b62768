// A clock for every operator of one model: in compiled code through calls that are written around
// its own (rankopt/diagnose/twin.py), in eager code through torch's record functions.
//
// One model is profiled at a time, on one thread; the operators themselves may use more.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <chrono>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace rankopt {
namespace {

// The time-stamp counter costs a third of what a system clock does, and its rate is constant on
// every CPU with AVX2.
inline int64_t ticks_now() {
#if defined(__x86_64__)
  return static_cast<int64_t>(__rdtsc());
#else
  return std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}

enum Role : int64_t { kConstant = 0, kInput = 1, kOutput = 2 };

struct Notes {
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> sites, roles;
  std::vector<int64_t> values, value_sites;
};

struct Event {
  const char* name;
  int64_t ticks;
};

// One row of sites a call; the compiled model goes on to the next row when it ends.
std::vector<int64_t> g_ticks;
Notes g_notes;

// Eager: the operators of one call, in order; what they call themselves counts as theirs.
struct Recording {
  std::vector<Event> events;
  std::vector<std::string> names;
  int64_t depth = 0;
  int64_t started = 0;
  at::CallbackHandle handle = 0;
  bool active = false;
  bool noting = false;
};
thread_local Recording t_recording;

// Ids are wanted for what they are, and the next operator may write over them; of activations only
// the form is kept, since all of them together may not fit into memory.
at::Tensor keepsake(const at::Tensor& tensor) {
  if (tensor.is_floating_point())
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  return tensor.clone();
}

void note_values(const c10::IValue& value, int64_t site, int64_t role) {
  if (value.isTensor() && value.toTensor().defined()) {
    // Made while scoring: an activation. What was there before is a weight or an input.
    const at::Tensor& tensor = value.toTensor();
    g_notes.tensors.push_back(tensor.is_inference() ? keepsake(tensor) : tensor);
    g_notes.sites.push_back(site);
    g_notes.roles.push_back(role);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) note_values(tensor, site, role);
  } else if (value.isInt()) {
    g_notes.values.push_back(value.toInt());
    g_notes.value_sites.push_back(site);
  }
}

std::unique_ptr<at::ObserverContext> on_enter(const at::RecordFunction& function) {
  Recording& recording = t_recording;
  if (recording.depth++ > 0) return nullptr;
  if (recording.noting) {
    const auto site = static_cast<int64_t>(recording.names.size());
    recording.names.emplace_back(function.name());
    for (const c10::IValue& value : function.inputs()) note_values(value, site, kInput);
  }
  recording.started = ticks_now();
  return nullptr;
}

void on_leave(const at::RecordFunction& function, at::ObserverContext*) {
  const int64_t now = ticks_now();
  Recording& recording = t_recording;
  if (recording.depth == 1) {
    recording.events.push_back({function.name(), now - recording.started});
    // Still one deep, so that what the noting itself calls is not taken for the model's.
    const auto site = static_cast<int64_t>(recording.names.size()) - 1;
    if (recording.noting)
      for (const c10::IValue& value : function.outputs()) note_values(value, site, kOutput);
  }
  --recording.depth;
}

void stop_eager() {
  if (t_recording.active) at::removeCallback(t_recording.handle);
  t_recording.active = false;
}

void start_eager(bool noting) {
  stop_eager();
  t_recording.events.clear();
  t_recording.names.clear();
  t_recording.depth = 0;
  t_recording.noting = noting;
  auto callback = at::RecordFunctionCallback(on_enter, on_leave);
  callback.scopes({at::RecordScope::FUNCTION}).needsInputs(noting).needsOutputs(noting);
  t_recording.handle = at::addThreadLocalCallback(callback);
  t_recording.active = true;
}

at::Tensor take(const std::vector<int64_t>& values) {
  at::Tensor result = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

at::Tensor take_eager() {
  std::vector<int64_t> ticks;
  ticks.reserve(t_recording.events.size());
  for (const Event& event : t_recording.events) ticks.push_back(event.ticks);
  t_recording.events.clear();
  return take(ticks);
}

}  // namespace
}  // namespace rankopt

// What a compiled model with clocks in it calls.
extern "C" {

AOTI_TORCH_EXPORT bool rankopt_profile_noting = false;
AOTI_TORCH_EXPORT int64_t* rankopt_profile_ticks = nullptr;
AOTI_TORCH_EXPORT int64_t* rankopt_profile_last = nullptr;

AOTI_TORCH_EXPORT void rankopt_profile_note(int64_t site, int64_t role, AtenTensorHandle handle) {
  const at::Tensor& tensor = *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
  if (!tensor.defined()) return;
  rankopt::g_notes.tensors.push_back(role == rankopt::kConstant ? tensor
                                                                : rankopt::keepsake(tensor));
  rankopt::g_notes.sites.push_back(site);
  rankopt::g_notes.roles.push_back(role);
}

AOTI_TORCH_EXPORT void rankopt_profile_note_value(int64_t site, int64_t value) {
  rankopt::g_notes.values.push_back(value);
  rankopt::g_notes.value_sites.push_back(site);
}

}  // extern "C"

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def("profile_clock() -> int", [] { return rankopt::ticks_now(); });
  m.def("profile_open(int num_sites, int num_calls) -> ()", [](int64_t num_sites, int64_t num_calls) {
    TORCH_CHECK(num_sites >= 1 && num_calls >= 1, "profile_open: needs sites and calls");
    // Rows of calls, and one that calls beyond them write over.
    rankopt::g_ticks.assign(static_cast<size_t>(num_sites * (num_calls + 1)), 0);
    rankopt_profile_ticks = rankopt::g_ticks.data();
    rankopt_profile_last = rankopt_profile_ticks + num_sites * num_calls;
  });
  // Ticks of the calls since the opening, [calls * sites]; the next call is the first again.
  m.def("profile_take() -> Tensor", [] {
    const auto used = static_cast<size_t>(rankopt_profile_ticks - rankopt::g_ticks.data());
    const at::Tensor result =
        rankopt::take({rankopt::g_ticks.begin(), rankopt::g_ticks.begin() + used});
    std::fill(rankopt::g_ticks.begin(), rankopt::g_ticks.end(), 0);
    rankopt_profile_ticks = rankopt::g_ticks.data();
    return result;
  });
  m.def("profile_note(bool on) -> ()", [](bool on) {
    if (on) rankopt::g_notes = {};
    rankopt_profile_noting = on;
  });
  m.def("profile_notes() -> (Tensor[], int[], int[], int[], int[])", [] {
    rankopt::Notes notes = std::move(rankopt::g_notes);
    rankopt::g_notes = {};
    return std::make_tuple(std::move(notes.tensors), std::move(notes.sites), std::move(notes.roles),
                           std::move(notes.values), std::move(notes.value_sites));
  });
  m.def("profile_eager_start(bool noting) -> ()", [](bool noting) {
    if (noting) rankopt::g_notes = {};
    rankopt::start_eager(noting);
  });
  m.def("profile_eager_stop() -> ()", [] { rankopt::stop_eager(); });
  m.def("profile_eager_take() -> Tensor", [] { return rankopt::take_eager(); });
  m.def("profile_eager_names() -> str[]", [] { return rankopt::t_recording.names; });
  // Ticks of a site around nothing, the median of many being what a clock costs.
  m.def("profile_empty(int num_rounds) -> float", [](int64_t num_rounds) {
    volatile int64_t sum = 0;
    const int64_t start = rankopt::ticks_now();
    for (int64_t i = 0; i < num_rounds; ++i) {
      const int64_t begun = rankopt::ticks_now();
      sum = sum + (rankopt::ticks_now() - begun);
    }
    return static_cast<double>(rankopt::ticks_now() - start) / static_cast<double>(num_rounds);
  });
}
