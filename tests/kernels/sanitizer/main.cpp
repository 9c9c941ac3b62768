// Runs every operator of the kernels on the calls in a file, on each instruction set of this CPU.
// Built with AddressSanitizer and UndefinedBehaviorSanitizer, so that an access outside of a tensor
// ends the program; results are compared elsewhere. `scripts/sanitize.py` builds and feeds it.
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

c10::OperatorHandle find(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("rankopt::" + name).c_str(), "");
}

torch::jit::Stack call(const std::string& name, torch::jit::Stack stack) {
  find(name).callBoxed(stack);
  return stack;
}

// A tensor of its own size exactly: memory behind it belongs to nobody. Strides are kept.
at::Tensor own(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor.clone() : tensor;
}

// What the file holds as a list of anything, as the list that the operator declares.
c10::IValue as_declared(const c10::IValue& value, const c10::TypePtr& type) {
  if (value.isTensor()) return own(value.toTensor());
  if (const auto list = type->cast<c10::ListType>()) {
    if (list->getElementType()->isSubtypeOf(*c10::TensorType::get())) {
      c10::List<at::Tensor> tensors;
      for (const c10::IValue& element : value.toListRef()) tensors.push_back(own(element.toTensor()));
      return tensors;
    }
    if (list->getElementType()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const c10::IValue& element : value.toListRef())
        tensors.push_back(element.isNone() ? std::nullopt : std::optional(own(element.toTensor())));
      return tensors;
    }
    c10::List<int64_t> numbers;
    for (const c10::IValue& element : value.toListRef()) numbers.push_back(element.toInt());
    return numbers;
  }
  return value;
}

void run(const std::string& name, const c10::ivalue::Tuple& arguments) {
  const auto& declared = find(name).schema().arguments();
  const auto& given = arguments.elements();
  torch::jit::Stack stack;
  for (size_t index = 0; index < declared.size(); ++index) {
    const auto& omitted = declared[index].default_value();
    TORCH_CHECK(index < given.size() || omitted, name, ": no value for ", declared[index].name());
    stack.push_back(index < given.size() ? as_declared(given[index], declared[index].real_type())
                                         : *omitted);
  }
  call(name, std::move(stack));
}

c10::IValue read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::jit::pickle_load(bytes);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: " << argv[0] << " FILE, as scripts/sanitize.py writes it\n";
    return 2;
  }
  at::set_num_threads(2);
  const c10::IValue calls = read(argv[1]);
  const c10::IValue isas = call("supported_isas", {}).at(0);
  for (const c10::IValue& isa : isas.toListRef()) {
    call("set_isa", {isa});
    for (const c10::IValue& each : calls.toListRef()) {
      const auto& pair = each.toTupleRef().elements();
      run(pair[0].toStringRef(), pair[1].toTupleRef());
    }
    std::cout << isa.toStringRef() << ": " << calls.toListRef().size() << " calls\n" << std::flush;
  }
  return 0;
}
