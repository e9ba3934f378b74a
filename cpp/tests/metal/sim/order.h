/*! \file Which encoders are ordered before which, and accesses of buffers that nothing orders. */
#ifndef MLX_TVM_FFI_TESTS_METAL_SIM_ORDER_H_
#define MLX_TVM_FFI_TESTS_METAL_SIM_ORDER_H_

#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

namespace metal_sim {

class Buffer;

/*! \brief A set of encoder numbers. */
class EncoderSet {
 public:
  void Add(int encoder);
  void Add(const EncoderSet& others);
  bool Has(int encoder) const;

 private:
  std::vector<bool> members_;
};

/*! \brief Guards everything below and the sets in queues. */
std::recursive_mutex& OrderMutex();

/*! \brief Encoders that the host has seen to be complete: what it commits later comes after. */
EncoderSet& SeenByHost();

/*! \brief Encoders that are ordered before an encoder. */
EncoderSet& Before(int encoder);

struct Access {
  int encoder;
  const void* command;  // one does not race with itself
  int epoch;            // number of barriers before it in its encoder
  bool concurrent;      // of the encoder's dispatches
  bool write;
  size_t begin, end;  // bytes of the buffer
  std::string kernel;
};

/*! \brief Note an access and report each earlier one that it races with. */
void NoteAccess(const Buffer* buffer, Access access);
void ForgetAccesses(const Buffer* buffer);

}  // namespace metal_sim

#endif  // MLX_TVM_FFI_TESTS_METAL_SIM_ORDER_H_
