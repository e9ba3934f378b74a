#include "python/rules.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>
#include <tvm/ffi/error.h>

#include <atomic>
#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "array/py_array.h"
#include "backend/reap.h"
#include "op/evaluation.h"
#include "python/attributes.h"

namespace mlx_tvm_ffi {

namespace py = pybind11;

namespace {

std::string TypeName(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::string Where(const std::string& op) { return "[mlx_tvm_ffi.op " + op + "] "; }

int32_t ReadDimension(const std::string& op, py::handle dimension) {
  if (PyIndex_Check(dimension.ptr()) == 0) {
    throw py::type_error(Where(op) + "outputs: expected dimensions that are integers, got " +
                         TypeName(dimension) + ". Use int().");
  }
  Py_ssize_t value = ReadIndex(dimension);
  if (value < 0 || value > std::numeric_limits<int32_t>::max()) {
    throw py::value_error(Where(op) + "outputs: expected dimensions from 0 to 2^31 - 1, got " +
                          ToText(dimension) + ". Correct the shape.");
  }
  return static_cast<int32_t>(value);
}

// Null where there is none. What a property raises is passed on.
py::object Attribute(py::handle object, const char* name) {
  PyObject* value = PyObject_GetAttrString(object.ptr(), name);
  if (value == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
    PyErr_Clear();
  }
  return py::reinterpret_steal<py::object>(value);
}

// Nothing where `spec` is none.
std::optional<ShapeDtype> ReadSpec(const std::string& op, py::handle spec) {
  py::object shape_object = Attribute(spec, "shape");
  py::object dtype_object = shape_object ? Attribute(spec, "dtype") : py::object();
  if (!dtype_object) return std::nullopt;
  std::optional<mx::Dtype> dtype = AsDtype(dtype_object.ptr());
  if (!dtype.has_value()) {
    throw py::type_error(Where(op) + "outputs: expected a dtype of mlx.core, got " +
                         TypeName(dtype_object) + ". Use one like mx.float32.");
  }
  if (!py::isinstance<py::sequence>(shape_object) || py::isinstance<py::str>(shape_object)) {
    throw py::type_error(Where(op) +
                         "outputs: expected a shape that is a sequence of integers, got " +
                         TypeName(shape_object) + ". Use a tuple.");
  }
  ShapeDtype result{{}, *dtype};
  constexpr size_t kMostBytes = size_t{1} << 62;
  size_t bytes = dtype->size();
  for (py::handle dimension : ReadItems(shape_object)) {
    result.shape.push_back(ReadDimension(op, dimension));
    size_t size = static_cast<size_t>(result.shape.back());
    if (size != 0 && bytes > kMostBytes / size) {
      throw py::value_error(Where(op) + "outputs: expected less than 2^62 bytes, got shape " +
                            ToText(shape_object) + ". Correct the shape.");
    }
    bytes *= size;
  }
  return result;
}

py::tuple ToTuple(const std::vector<mx::array>& arrays) {
  py::tuple result(arrays.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    PyObject* object = FromArray(arrays[i]);
    if (object == nullptr) throw py::error_already_set();
    result[i] = py::reinterpret_steal<py::object>(object);
  }
  return result;
}

// As an op returns them: one array, or a tuple of several.
py::object ToOneOrTuple(const std::vector<mx::array>& arrays) {
  py::tuple all = ToTuple(arrays);
  return all.size() == 1 ? py::object(all[0]) : py::object(all);
}

/*! \brief Python's lock, and the primitive's stream for what a rule calls. */
class RuleScope {
 public:
  explicit RuleScope(const mx::Stream& stream)
      : scope_(ToStreamRef(stream)), previous_(mx::default_stream(stream.device)) {
    mx::set_default_stream(stream);
  }
  RuleScope(const RuleScope&) = delete;
  RuleScope& operator=(const RuleScope&) = delete;
  ~RuleScope() { mx::set_default_stream(previous_); }

 private:
  py::gil_scoped_acquire lock_;
  StreamScope scope_;
  mx::Stream previous_;
};

py::dict Keywords(const std::shared_ptr<const HeldObject>& keywords) {
  return keywords == nullptr ? py::dict() : py::reinterpret_borrow<py::dict>(keywords->get());
}

// Throws a Python exception as MLX's own bindings do: by them, from a rule of mx.custom_function.
// No other way leads it through a transformation as what it is.
void ThrowByMlx(const py::error_already_set& error) {
  static thread_local PyObject* exception = nullptr;
  static const mx::array* thrower = [] {
    py::module_ core = py::module_::import("mlx.core");
    py::object function =
        core.attr("custom_function")(py::cpp_function([](py::object x) { return x; }));
    function.attr("vjp")(py::cpp_function([](const py::args&) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
      throw py::error_already_set();
    }));
    return new mx::array(*AsArray(py::object(function(core.attr("array")(0.0))).ptr()));
  }();
  exception = error.value().ptr();
  if (error.trace()) PyException_SetTraceback(exception, error.trace().ptr());
  thrower->primitive().vjp({*thrower, *thrower}, {*thrower}, {0}, {*thrower});
}

// Runs Python code of a rule. MLX makes every other exception of a transformation a RuntimeError
// with its text.
template <typename Run>
auto InRule(const std::string& op, const char* name, Run run) {
  try {
    return run();
  } catch (const py::error_already_set& error) {
    // An interrupt or an exit of the program is no error of the rule.
    if (!error.matches(PyExc_Exception)) ThrowByMlx(error);
    throw std::runtime_error(Where(op) + name + ": " + error.what());
  }
}

template <typename... Arguments>
py::object CallRule(const std::string& op, const char* name, const HeldObject& rule,
                    const std::shared_ptr<const HeldObject>& keywords, Arguments&&... arguments) {
  return InRule(op, name, [&]() -> py::object {
    return rule.get()(std::forward<Arguments>(arguments)..., **Keywords(keywords));
  });
}

// The arrays a rule returned: one, or a sequence; `count` of them. None where `optional` gives
// nothing.
std::vector<std::optional<mx::array>> ReadArrays(const std::string& op, const char* rule,
                                                 py::handle result, size_t count, bool optional) {
  py::tuple items =
      AsArray(result.ptr()) != nullptr || (result.is_none() && count == 1) ? py::make_tuple(result)
      : py::isinstance<py::sequence>(result)
          ? InRule(op, rule, [&] { return ReadItems(result); })
          : throw py::type_error(Where(op) + rule + ": expected a rule that returns arrays, got " +
                                 TypeName(result) + ". Return a tuple of arrays.");
  if (items.size() != count) {
    throw py::value_error(Where(op) + rule + ": expected a rule that returns " +
                          std::to_string(count) + " arrays, got " + std::to_string(items.size()) +
                          ". Return one for each.");
  }
  std::vector<std::optional<mx::array>> arrays;
  for (py::handle item : items) {
    mx::array* array = AsArray(item.ptr());
    if (array == nullptr && !(optional && item.is_none())) {
      throw py::type_error(Where(op) + rule + ": expected a rule that returns arrays, got " +
                           TypeName(item) + ". Return mlx.core.array objects.");
    }
    arrays.push_back(array == nullptr ? std::nullopt : std::optional(*array));
  }
  return arrays;
}

// As "2 outputs (float32, int32)".
std::string Dtypes(const std::vector<ShapeDtype>& specs) {
  std::ostringstream text;
  text << specs.size() << (specs.size() == 1 ? " output (" : " outputs (");
  for (size_t i = 0; i < specs.size(); ++i) text << (i == 0 ? "" : ", ") << specs[i].dtype;
  text << ")";
  return text.str();
}

std::string Describe(const mx::Shape& shape, mx::Dtype dtype) {
  std::ostringstream text;
  text << dtype << shape;
  return text.str();
}

void ExpectShape(const std::string& op, const char* rule, const mx::array& got,
                 const mx::Shape& shape) {
  if (got.shape() == shape) return;
  throw py::value_error(Where(op) + rule + ": expected an array of shape " +
                        Describe(shape, got.dtype()) + ", got " +
                        Describe(got.shape(), got.dtype()) + ". Correct the rule.");
}

// A gradient or tangent of `like`; kernels further on rely on its dtype.
mx::array ReadLike(const std::string& op, const char* rule, const mx::array& got,
                   const mx::array& like, const mx::Stream& stream) {
  ExpectShape(op, rule, got, like.shape());
  return mx::astype(got, like.dtype(), stream);
}

using ArraysFunction = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

// A rule is written for one element: `batches` leading dimensions are mapped over.
std::vector<mx::array> MapOver(int batches, ArraysFunction rule,
                               const std::vector<mx::array>& arrays) {
  for (; batches > 0; --batches) rule = mx::vmap(rule);
  return rule(arrays);
}

std::vector<mx::array> Join(std::initializer_list<const std::vector<mx::array>*> parts) {
  std::vector<mx::array> all;
  for (const auto* part : parts) all.insert(all.end(), part->begin(), part->end());
  return all;
}

std::vector<mx::array> Take(const std::vector<mx::array>& all, size_t from, size_t count) {
  auto begin = all.begin() + static_cast<std::ptrdiff_t>(from);
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

int ReadAxis(const std::string& op, py::handle axis, int ndim) {
  Py_ssize_t value = PyIndex_Check(axis.ptr()) != 0
                         ? InRule(op, "vmap", [&] { return ReadIndex(axis); })
                         : throw py::type_error(Where(op) +
                                                "vmap: expected an axis that is an "
                                                "integer or None, got " +
                                                TypeName(axis) + ". Correct the rule.");
  if (value < -ndim || value >= ndim) {
    throw py::value_error(Where(op) + "vmap: expected an axis of an output with " +
                          std::to_string(ndim) + " dimensions, got " + std::to_string(value) +
                          ". Correct the rule.");
  }
  return static_cast<int>(value < 0 ? value + ndim : value);
}

// From here on a thread that asks for Python's lock never runs again.
bool IsFinalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Whether the interpreter is about to end.
std::atomic<bool> kernels_stopped{false};

}  // namespace

HeldObject::~HeldObject() {
  // After finalisation there is no interpreter to give the reference back to.
  if (object_ == nullptr || Py_IsInitialized() == 0 || IsFinalizing()) return;
  if (PyGILState_Check() == 1) {
    Py_DECREF(object_);
    return;
  }
  // A thread that ends while the interpreter does must not ask for the lock: it would never get it.
  Reap({std::shared_ptr<void>(object_, [](void* object) {
    py::gil_scoped_acquire lock;
    Py_DECREF(static_cast<PyObject*>(object));
  })});
}

std::vector<ShapeDtype> ReadOutputs(const std::string& op, py::handle outputs) {
  std::vector<ShapeDtype> specs;
  if (mx::array* like =
          AsArray(outputs.ptr())) {  // as with outputs=lambda x: x, without a detour by Python
    specs.push_back({like->shape(), like->dtype()});
  } else if (std::optional<ShapeDtype> only = ReadSpec(op, outputs)) {
    specs.push_back(*std::move(only));
  } else if (py::isinstance<py::sequence>(outputs) && !py::isinstance<py::str>(outputs)) {
    for (py::handle item : ReadItems(outputs)) {
      std::optional<ShapeDtype> spec = ReadSpec(op, item);
      if (!spec.has_value()) {
        throw py::type_error(Where(op) + "outputs: expected things with .shape and .dtype, got " +
                             TypeName(item) + ". Use mlx_tvm_ffi.ShapeDtype.");
      }
      specs.push_back(*std::move(spec));
    }
    if (specs.empty()) {
      throw py::value_error(
          Where(op) + "outputs: expected at least one, got none. Say what the kernel writes.");
    }
  } else {
    throw py::type_error(
        Where(op) +
        "outputs: expected something with .shape and .dtype, or a sequence of those, got " +
        TypeName(outputs) + ". Use mlx_tvm_ffi.ShapeDtype.");
  }
  return specs;
}

PyPrimitive::PyPrimitive(mx::Stream stream, std::shared_ptr<const KernelCall> call,
                         std::shared_ptr<const std::vector<ShapeDtype>> outputs,
                         std::shared_ptr<const Rules> rules,
                         std::shared_ptr<const HeldObject> keywords, int batches)
    : KernelPrimitive(stream, std::move(call), std::move(outputs)),
      rules_(std::move(rules)),
      keywords_(std::move(keywords)),
      batches_(batches) {}

PyPrimitive::~PyPrimitive() {
  // A Python kernel takes the lock when it dies, see ~HeldObject.
  if (rules_->python_kernel) Reap({std::const_pointer_cast<KernelCall>(call())});
}

void PyPrimitive::StopKernels() { kernels_stopped = true; }

void PyPrimitive::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  if (rules_->python_kernel && kernels_stopped) {
    TVM_FFI_THROW(RuntimeError)
        << Where(name()) << "evaluation: expected a running interpreter, which this Python kernel "
        << "needs, got one that ends. Evaluate before the end of the program.";
  }
  if (!rules_->python_kernel) return KernelPrimitive::eval_cpu(inputs, outputs);
  // MLX waits with Python's lock in mx.save, and in mx.synchronize before 0.32.3: for what that
  // evaluates, or what mx.async_eval scheduled before.
  bool has_lock = PyGILState_Check() == 1;
  std::optional<py::gil_scoped_release> release;
  if (has_lock) release.emplace();
  Evaluate(*this, inputs, outputs, has_lock || outputs[0].event().valid());
}

std::vector<mx::array> PyPrimitive::vjp(const std::vector<mx::array>& primals,
                                        const std::vector<mx::array>& cotangents,
                                        const std::vector<int>& argnums,
                                        const std::vector<mx::array>& outputs) {
  RuleScope scope(stream());
  if (rules_->vjp.get().is_none()) {
    return KernelPrimitive::vjp(primals, cotangents, argnums, outputs);
  }
  size_t inputs = primals.size();
  size_t count = outputs.size();
  auto rule = [&](const std::vector<mx::array>& all) {
    std::vector<mx::array> primals = Take(all, 0, inputs);
    std::vector<mx::array> cotangents = Take(all, inputs, count);
    std::vector<mx::array> outputs = Take(all, inputs + count, count);
    for (size_t i = 0; i < count; ++i) {
      cotangents[i] = mx::astype(cotangents[i], outputs[i].dtype(), stream());
    }
    py::object result = CallRule(name(), "vjp", rules_->vjp, keywords_, ToTuple(primals),
                                 ToOneOrTuple(cotangents), ToOneOrTuple(outputs));
    auto gradients = ReadArrays(name(), "vjp", result, inputs, true);
    std::vector<mx::array> chosen;
    for (int i : argnums) {
      const mx::array& primal = primals[static_cast<size_t>(i)];
      const auto& gradient = gradients[static_cast<size_t>(i)];
      chosen.push_back(gradient.has_value() ? ReadLike(name(), "vjp", *gradient, primal, stream())
                                            : mx::zeros_like(primal, stream()));
    }
    return chosen;
  };
  return MapOver(batches_, rule, Join({&primals, &cotangents, &outputs}));
}

std::vector<mx::array> PyPrimitive::jvp(const std::vector<mx::array>& primals,
                                        const std::vector<mx::array>& tangents,
                                        const std::vector<int>& argnums) {
  RuleScope scope(stream());
  if (rules_->jvp.get().is_none()) return KernelPrimitive::jvp(primals, tangents, argnums);
  size_t inputs = primals.size();
  std::vector<mx::array> all_tangents;
  for (const mx::array& primal : primals) {
    all_tangents.push_back(mx::zeros_like(primal, stream()));
  }
  for (size_t i = 0; i < argnums.size(); ++i) {
    size_t input = static_cast<size_t>(argnums[i]);
    all_tangents[input] = mx::astype(tangents[i], primals[input].dtype(), stream());
  }
  std::vector<mx::array> outputs = Apply(Clone(this->outputs()), primals);
  auto rule = [&, count = outputs.size()](const std::vector<mx::array>& all) {
    std::vector<mx::array> outputs = Take(all, 2 * inputs, count);
    py::object result =
        CallRule(name(), "jvp", rules_->jvp, keywords_, ToTuple(Take(all, 0, inputs)),
                 ToTuple(Take(all, inputs, inputs)), ToOneOrTuple(outputs));
    auto read = ReadArrays(name(), "jvp", result, count, false);
    std::vector<mx::array> chosen;
    for (size_t i = 0; i < count; ++i) {
      chosen.push_back(ReadLike(name(), "jvp", *read[i], outputs[i], stream()));
    }
    return chosen;
  };
  return MapOver(batches_, rule, Join({&primals, &all_tangents, &outputs}));
}

std::pair<std::vector<mx::array>, std::vector<int>> PyPrimitive::vmap(
    const std::vector<mx::array>& inputs, const std::vector<int>& axes) {
  RuleScope scope(stream());
  if (rules_->vmap.get().is_none()) return KernelPrimitive::vmap(inputs, axes);
  py::tuple py_axes(axes.size());
  for (size_t i = 0; i < axes.size(); ++i) {
    py_axes[i] = axes[i] < 0 ? py::object(py::none()) : py::object(py::int_(axes[i]));
  }
  py::object result = CallRule(name(), "vmap", rules_->vmap, keywords_, ToTuple(inputs), py_axes);
  if (!py::isinstance<py::tuple>(result) || PyTuple_GET_SIZE(result.ptr()) != 2) {
    throw py::type_error(Where(name()) +
                         "vmap: expected a rule that returns (outputs, axes), got " +
                         TypeName(result) + ". Return a tuple of two.");
  }
  const std::vector<ShapeDtype>& specs = *outputs();
  auto pair = py::reinterpret_borrow<py::tuple>(result);
  py::object out_axes = pair[1];
  if (!py::isinstance<py::sequence>(out_axes)) out_axes = py::make_tuple(out_axes);
  py::tuple axes_of_outputs = InRule(name(), "vmap", [&] { return ReadItems(out_axes); });
  if (axes_of_outputs.size() != specs.size()) {
    throw py::value_error(Where(name()) + "vmap: expected an axis for each of " +
                          std::to_string(specs.size()) + " outputs, got " +
                          std::to_string(axes_of_outputs.size()) +
                          ". Use None for one without a batch.");
  }
  int batch = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) batch = inputs[i].shape(axes[i]);
  }
  auto read = ReadArrays(name(), "vmap", pair[0], specs.size(), false);
  std::vector<mx::array> arrays;
  std::vector<int> chosen;
  for (size_t i = 0; i < specs.size(); ++i) {
    mx::array array = mx::astype(*read[i], specs[i].dtype, stream());
    py::object out_axis = axes_of_outputs[i];
    mx::Shape shape = specs[i].shape;
    int axis = 0;
    if (out_axis.is_none()) {  // MLX would take the last axis for the batch
      ExpectShape(name(), "vmap", array, shape);
      shape.insert(shape.begin(), batch);
      array = mx::broadcast_to(array, shape, stream());
    } else {
      axis = ReadAxis(name(), out_axis, static_cast<int>(shape.size()) + 1);
      shape.insert(shape.begin() + axis, batch);
      ExpectShape(name(), "vmap", array, shape);
    }
    arrays.push_back(std::move(array));
    chosen.push_back(axis);
  }
  return {arrays, chosen};
}

std::vector<mx::Shape> PyPrimitive::output_shapes(const std::vector<mx::array>& inputs) {
  RuleScope scope(stream());
  if (rules_->outputs.get().is_none()) return KernelPrimitive::output_shapes(inputs);
  std::vector<mx::array> elements;
  mx::Shape batch;
  for (const mx::array& input : inputs) {
    auto first = input.shape().begin() + batches_;
    batch = mx::Shape(input.shape().begin(), first);
    elements.emplace_back(mx::Shape(first, input.shape().end()), input.dtype(), nullptr,
                          std::vector<mx::array>{});
  }
  std::vector<ShapeDtype> specs = InRule(name(), "outputs", [&] {
    py::tuple arrays = ToTuple(batches_ == 0 ? inputs : elements);
    return ReadOutputs(name(), rules_->outputs.get()(*arrays, **Keywords(keywords_)));
  });
  std::string now = Dtypes(specs), traced = Dtypes(*outputs());
  if (now != traced) {  // MLX relies on it
    throw std::invalid_argument(
        Where(name()) + "outputs: expected " + traced +
        ", as when mx.compile traced the call, for inputs of other shapes too, got " + now +
        ". Compile without shapeless=True.");
  }
  std::vector<mx::Shape> shapes;
  for (const ShapeDtype& spec : specs) {
    shapes.push_back(batch);
    shapes.back().insert(shapes.back().end(), spec.shape.begin(), spec.shape.end());
  }
  return shapes;
}

bool PyPrimitive::is_equivalent(const mx::Primitive& other) const {
  const auto* peer = dynamic_cast<const PyPrimitive*>(&other);
  if (peer == nullptr || peer->batches_ != batches_) return false;
  if (!KernelPrimitive::is_equivalent(other)) return false;
  const Rules& a = *rules_;
  const Rules& b = *peer->rules_;
  return &a == &b || (a.outputs.get().is(b.outputs.get()) && a.vjp.get().is(b.vjp.get()) &&
                      a.jvp.get().is(b.jvp.get()) && a.vmap.get().is(b.vmap.get()));
}

std::shared_ptr<KernelPrimitive> PyPrimitive::Clone(
    std::shared_ptr<const std::vector<ShapeDtype>> outputs) const {
  mx::Stream stream = const_cast<PyPrimitive*>(this)->stream();  // not const in MLX
  // Under vmap the outputs have a dimension more, in front.
  int batches = batches_ + static_cast<int>(outputs->front().shape.size()) -
                static_cast<int>(this->outputs()->front().shape.size());
  return std::make_shared<PyPrimitive>(stream, call(), std::move(outputs), rules_, keywords_,
                                       batches);
}

}  // namespace mlx_tvm_ffi
