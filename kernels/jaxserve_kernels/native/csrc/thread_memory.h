// Memory that a thread keeps from one task to the next.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace jaxserve {

// Floats, aligned to cache lines. What they hold is lost where more are asked for.
class Memory {
 public:
  float* hold(int64_t floats) {
    if (floats > size_) {
      floats_.reset(new (std::align_val_t{64}) float[floats]);
      size_ = floats;
    }
    return floats_.get();
  }

 private:
  struct Delete {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Delete> floats_;
  int64_t size_ = 0;
};

}  // namespace jaxserve
