#include "python/op_type.h"

#include <mlx_tvm_ffi/op.h>
#include <pybind11/stl.h>
#include <structmember.h>
#include <tvm/ffi/error.h>

#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "array/py_array.h"
#include "array/py_error.h"
#include "backend/backend.h"
#include "backend/reap.h"
#include "python/attributes.h"
#include "python/rules.h"

namespace mlx_tvm_ffi {

namespace py = pybind11;

namespace {

/*! \brief What an op is; shared with no other, read by every call. */
struct OpState {
  std::shared_ptr<const Kernel> kernel;
  std::shared_ptr<const KernelCall> plain;                 // the call without attributes
  std::shared_ptr<const std::vector<ShapeDtype>> outputs;  // null: the rules' callable says
  std::shared_ptr<const Rules> rules;  // null: neither callable outputs nor transforms
  PyObject* callable;                  // what the kernel was made of and holds; null: no callable
  // Plain calls of so many inputs on such a device were found right.
  mutable std::optional<std::pair<size_t, mx::Device>> checked;

  /*! \brief Whether no node, run or tvm_ffi.Function but this op holds the kernel. With Python's
   * lock held, without which none of them gets it. */
  bool HoldsKernelAlone() const {
    return plain.use_count() == 1 && kernel.use_count() == 2 && kernel->function().use_count() == 1;
  }
};

struct OpObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* weak_references;
  OpState state;
};

std::string Where(const OpState& state) {
  return "[mlx_tvm_ffi.op " + state.kernel->options().name + "] ";
}

/*! \brief A call as it came: inputs, stream, attributes. */
struct ParsedCall {
  std::vector<mx::array> inputs;
  mx::StreamOrDevice stream = {};
  Attributes attributes;
  py::object keywords;  // a dict of what the attributes were, where a rule will want it
};

ParsedCall ParseCall(const OpState& state, PyObject* const* args, size_t count, PyObject* names) {
  static PyObject* stream_name = PyUnicode_InternFromString("stream");
  ParsedCall call;
  call.inputs.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    mx::array* array = AsArray(args[i]);
    if (array == nullptr) {
      throw py::type_error(Where(state) + "input " + std::to_string(i) +
                           ": expected an mlx.core.array, got " + Py_TYPE(args[i])->tp_name +
                           ". Use mx.array(), or pass attributes by name.");
    }
    call.inputs.push_back(*array);
  }
  Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    auto value = py::reinterpret_borrow<py::object>(args[count + static_cast<size_t>(i)]);
    if (name == stream_name || PyUnicode_Compare(name, stream_name) == 0) {
      std::optional<mx::StreamOrDevice> stream = AsStreamOrDevice(value.ptr());
      if (!stream.has_value()) {
        throw py::type_error(Where(state) +
                             "stream: expected an mlx.core.Stream, a device or None, got " +
                             Py_TYPE(value.ptr())->tp_name + ". Open a scope for other streams.");
      }
      call.stream = *stream;
      continue;
    }
    Py_ssize_t size = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(name, &size);
    if (utf8 == nullptr) throw py::error_already_set();
    std::string key(utf8, static_cast<size_t>(size));
    call.attributes.emplace_back(key, ToAttribute(state.kernel->options().name, key, &value));
    if (state.rules != nullptr) {
      if (!call.keywords) call.keywords = py::dict();
      call.keywords[py::handle(name)] = value;
    }
  }
  return call;
}

std::shared_ptr<const std::vector<ShapeDtype>> OutputsOf(const OpState& state,
                                                         const ParsedCall& call,
                                                         PyObject* const* args, size_t count) {
  if (state.outputs != nullptr) return state.outputs;
  py::tuple arrays(count);
  for (size_t i = 0; i < count; ++i) arrays[i] = py::handle(args[i]);
  py::dict keywords = call.keywords ? py::dict(call.keywords) : py::dict();
  py::object specs = state.rules->outputs.get()(*arrays, **keywords);
  return std::make_shared<const std::vector<ShapeDtype>>(
      ReadOutputs(state.kernel->options().name, specs));
}

PyObject* ToTuple(std::vector<mx::array> arrays) {
  py::tuple result(arrays.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    PyObject* object = FromArray(std::move(arrays[i]));
    if (object == nullptr) return nullptr;
    result[i] = py::reinterpret_steal<py::object>(object);
  }
  return result.release().ptr();
}

PyObject* CallOp(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  try {
    const OpState& state = reinterpret_cast<OpObject*>(self)->state;
    size_t count = static_cast<size_t>(PyVectorcall_NARGS(nargsf));
    ParsedCall call = ParseCall(state, args, count, names);
    auto outputs = OutputsOf(state, call, args, count);
    mx::Stream stream = ToStream(call.stream);
    auto bound = call.attributes.empty() ? state.plain
                                         : std::make_shared<const KernelCall>(KernelCall{
                                               state.kernel, std::move(call.attributes)});
    std::shared_ptr<KernelPrimitive> primitive;
    if (state.rules == nullptr) {
      primitive = std::make_shared<KernelPrimitive>(stream, std::move(bound), std::move(outputs));
    } else {
      auto keywords =
          call.keywords ? std::make_shared<const HeldObject>(std::move(call.keywords)) : nullptr;
      primitive = std::make_shared<PyPrimitive>(stream, std::move(bound), std::move(outputs),
                                                state.rules, std::move(keywords));
    }
    if (primitive->outputs()->size() > 1) return ToTuple(Apply(primitive, std::move(call.inputs)));
    bool plain = primitive->call() == state.plain && primitive->outputs() == state.outputs;
    std::pair<size_t, mx::Device> like{count, stream.device};
    if (!plain || state.checked != like) {
      primitive->Check(call.inputs);
      // With aliases it depends on the arrays.
      if (plain && state.kernel->options().aliases.empty()) state.checked = like;
    }
    const ShapeDtype& output = primitive->outputs()->front();
    return FromArray(
        mx::array(output.shape, output.dtype, std::move(primitive), std::move(call.inputs)));
  } catch (...) {
    SetPythonError();
    return nullptr;
  }
}

// The callables of an op may refer to it, as those of a layer that makes its own op do. Calls that
// still run share them, which the collector takes for a reference from outside. tvm-ffi's function
// holds one reference to its callable, where no collector looks: this op's where it holds the
// function alone.
int TraverseOp(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const OpState& state = reinterpret_cast<OpObject*>(self)->state;
  if (state.callable != nullptr && state.HoldsKernelAlone()) Py_VISIT(state.callable);
  const std::shared_ptr<const Rules>& rules = state.rules;
  if (rules.use_count() != 1) return 0;
  for (const HeldObject* held : {&rules->outputs, &rules->vjp, &rules->jvp, &rules->vmap}) {
    Py_VISIT(held->get().ptr());
  }
  return 0;
}

void DeallocateOp(PyObject* self) {
  PyObject_GC_UnTrack(self);
  auto* op = reinterpret_cast<OpObject*>(self);
  PyTypeObject* type = Py_TYPE(self);
  if (op->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  op->state.~OpState();
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* ReprOp(PyObject* self) {
  return PyUnicode_FromFormat(
      "<mlx_tvm_ffi.Op %s>",
      reinterpret_cast<OpObject*>(self)->state.kernel->options().name.c_str());
}

PyObject* NameOfOp(PyObject* self, void*) {
  return PyUnicode_FromString(
      reinterpret_cast<OpObject*>(self)->state.kernel->options().name.c_str());
}

PyTypeObject* MakeOpType() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(OpObject, vectorcall), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(OpObject, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyGetSetDef properties[] = {
      {"name", NameOfOp, nullptr, "The op's name, in messages and in the graph.", nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("A kernel as an op of MLX's graph; made by mlx_tvm_ffi.op.")},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_traverse, reinterpret_cast<void*>(TraverseOp)},
      {Py_tp_dealloc, reinterpret_cast<void*>(DeallocateOp)},
      {Py_tp_repr, reinterpret_cast<void*>(ReprOp)},
      {Py_tp_members, members},
      {Py_tp_getset, properties},
      {0, nullptr}};
  static PyType_Spec spec = {"mlx_tvm_ffi.Op", sizeof(OpObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                 Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

PyTypeObject* op_type = nullptr;

// Whether a Python kernel may still run when the process ends.
bool python_kernels_made = false;

// Functions made of Python callables share one entry point, whoever made them.
bool IsPythonKernel(TVMFFIObject* function) {
  static const TVMFFISafeCallType kEntry = [] {
    py::object probe = py::module_::import("tvm_ffi").attr("convert")(
        py::module_::import("builtins").attr("print"));
    return TVMFFIFunctionGetCellPtr(
               reinterpret_cast<void*>(probe.attr("__chandle__")().cast<uintptr_t>()))
        ->safe_call;
  }();
  return TVMFFIFunctionGetCellPtr(function)->safe_call == kEntry;
}

// Returns once what `stream` was given has run, whatever errors it has.
void WaitFor(const mx::Stream& stream) {
  for (;;) {
    try {
      return mx::synchronize(stream);
    } catch (const std::exception&) {
      // It may not have waited; each error is thrown once, and nobody is left to hear of it.
    }
  }
}

// Before Python goes: Python kernels that MLX has scheduled run to their end, no more start, and
// the reaper stops. A forked child has none of the threads that would run them.
void Finish(int process) {
  if (process != py::module_::import("os").attr("getpid")().cast<int>()) return;
  py::gil_scoped_release release;
  PyPrimitive::StopKernels();
  if (python_kernels_made) {
    for (const mx::Stream& stream : mx::get_streams()) {
      if (stream.device == mx::Device::cpu) WaitFor(stream);
    }
  }
  StopReaping();
}

py::object MakeOp(uintptr_t function, py::handle callable, const std::string& name,
                  std::vector<std::string> arg_spec, std::vector<bool> contiguous, bool offsets,
                  std::vector<std::pair<int, int>> aliases, bool pure, bool capture,
                  const std::string& batching, py::object outputs, py::object vjp, py::object jvp,
                  py::object vmap) {
  TVMFFIAny view{};
  view.type_index = kTVMFFIFunction;
  view.v_obj = reinterpret_cast<TVMFFIObject*>(function);
  Options options{name,
                  std::move(arg_spec),
                  std::move(contiguous),
                  offsets,
                  std::move(aliases),
                  pure,
                  capture,
                  batching == "sequential"  ? Vmap::kSequential
                  : batching == "broadcast" ? Vmap::kBroadcast
                                            : Vmap::kNone};
  OpState state{};
  state.callable = callable.is_none() ? nullptr : callable.ptr();
  state.kernel = std::make_shared<const Kernel>(
      tvm::ffi::AnyView::CopyFromTVMFFIAny(view).cast<tvm::ffi::Function>(), std::move(options));
  state.plain = std::make_shared<const KernelCall>(KernelCall{state.kernel, {}});
  bool fixed = PyCallable_Check(outputs.ptr()) == 0;
  if (fixed) {
    state.outputs = std::make_shared<const std::vector<ShapeDtype>>(ReadOutputs(name, outputs));
    outputs = py::none();
  }
  bool python_kernel = IsPythonKernel(view.v_obj);
  python_kernels_made |= python_kernel;
  if (python_kernel || !fixed || !vjp.is_none() || !jvp.is_none() || !vmap.is_none()) {
    state.rules = std::shared_ptr<const Rules>(
        new Rules{HeldObject(std::move(outputs)), HeldObject(std::move(vjp)),
                  HeldObject(std::move(jvp)), HeldObject(std::move(vmap)), python_kernel});
  }
  PyObject* object = op_type->tp_alloc(op_type, 0);
  if (object == nullptr) throw py::error_already_set();
  auto* op = reinterpret_cast<OpObject*>(object);
  op->vectorcall = CallOp;
  op->weak_references = nullptr;
  new (&op->state) OpState(std::move(state));
  return py::reinterpret_steal<py::object>(object);
}

}  // namespace

void BindOp(py::module_& module) {
  op_type = MakeOpType();
  module.attr("Op") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(op_type));
  module.def("make_op", &MakeOp, py::arg("function"), py::arg("callable"), py::kw_only(),
             py::arg("name"), py::arg("arg_spec"), py::arg("contiguous"), py::arg("offsets"),
             py::arg("aliases"), py::arg("pure"), py::arg("capture"), py::arg("batching"),
             py::arg("outputs"), py::arg("vjp"), py::arg("jvp"), py::arg("vmap"));
  py::module_::import("atexit").attr("register")(py::cpp_function(&Finish),
                                                 py::module_::import("os").attr("getpid")());
}

}  // namespace mlx_tvm_ffi
