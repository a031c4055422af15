// CPU training kernels, called from JAX through the XLA FFI.
//
//   KdaForward / KdaBackward    the gated delta rule of Kimi Delta Attention in recurrent form
//   ConvForward / ConvBackward  causal depthwise convolution of width 4, then SiLU
//
// Rule: every output element is written by one thread in a fixed order, so a run is repeatable
// bit for bit on the same number of threads. Layout: q, k, v, decay [B, T, H, D]; beta [B, T, H];
// the state S is [D keys, D values] per head. `decay` is exp(log decay), in (0, 1].
//
// Per token:  S = decay * S;  u = beta * (v - S^T k);  S = S + k u^T;  o = S^T q.
// The backward pass recomputes the states of one chunk at a time from a checkpoint.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Input = ffi::Buffer<ffi::F32>;
using Output = ffi::ResultBuffer<ffi::F32>;

constexpr int kChunk = 16;  // tokens between two stored states
constexpr int kTaps = 4;    // width of the convolution

namespace {

struct Shape {
  int batch, length, heads;
  size_t row(int b, int t, int h) const { return ((size_t)b * length + t) * heads + h; }
  int chunks() const { return (length + kChunk - 1) / kChunk; }
};

template <int D>
void kda_forward(Shape s, const float* q, const float* k, const float* v, const float* decay,
                 const float* beta, float* o, float* checkpoints) {
#pragma omp parallel for schedule(static)
  for (int bh = 0; bh < s.batch * s.heads; ++bh) {
    alignas(64) float S[D][D] = {};
    for (int t = 0; t < s.length; ++t) {
      if (t % kChunk == 0)
        std::memcpy(checkpoints + ((size_t)bh * s.chunks() + t / kChunk) * D * D, S, sizeof S);
      const size_t row = s.row(bh / s.heads, t, bh % s.heads);
      const float *qt = q + row * D, *kt = k + row * D, *vt = v + row * D, *at = decay + row * D;
      alignas(64) float u[D] = {}, ot[D] = {};
      for (int i = 0; i < D; ++i)
        for (int j = 0; j < D; ++j) {
          S[i][j] *= at[i];
          u[j] += kt[i] * S[i][j];
        }
      for (int j = 0; j < D; ++j) u[j] = beta[row] * (vt[j] - u[j]);
      for (int i = 0; i < D; ++i)
        for (int j = 0; j < D; ++j) {
          S[i][j] += kt[i] * u[j];
          ot[j] += qt[i] * S[i][j];
        }
      std::memcpy(o + row * D, ot, sizeof ot);
    }
  }
}

struct Grads {
  float *q, *k, *v, *log_decay, *beta;
};

// What the forward pass computed inside one chunk: the decayed state before each update,
// u, and the prediction S^T k.
template <int D>
struct ChunkStates {
  alignas(64) float state[kChunk][D][D];
  alignas(64) float u[kChunk][D];
  alignas(64) float predicted[kChunk][D];

  void recompute(const float* start, Shape s, int b, int h, int t0, int count, const float* k,
                 const float* v, const float* decay, const float* beta) {
    std::memcpy(state[0], start, sizeof state[0]);
    for (int r = 0; r < count; ++r) {
      const size_t row = s.row(b, t0 + r, h);
      const float *kt = k + row * D, *vt = v + row * D, *at = decay + row * D;
      alignas(64) float p[D] = {};
      for (int i = 0; i < D; ++i)
        for (int j = 0; j < D; ++j) {
          state[r][i][j] *= at[i];
          p[j] += kt[i] * state[r][i][j];
        }
      for (int j = 0; j < D; ++j) {
        predicted[r][j] = p[j];
        u[r][j] = beta[row] * (vt[j] - p[j]);
      }
      if (r + 1 == count) break;
      for (int i = 0; i < D; ++i)
        for (int j = 0; j < D; ++j) state[r + 1][i][j] = state[r][i][j] + kt[i] * u[r][j];
    }
  }
};

// One token backwards. dS arrives as the gradient of the state after the token and leaves as the
// gradient of the state before it.
template <int D>
void kda_backward_token(const ChunkStates<D>& c, int r, size_t row, float dS[D][D], const float* q,
                        const float* k, const float* v, const float* decay, const float* beta,
                        const float* d_out, Grads d) {
  const float *qt = q + row * D, *kt = k + row * D, *vt = v + row * D, *at = decay + row * D;
  const float *dot = d_out + row * D, *u = c.u[r];
  alignas(64) float du[D] = {}, dp[D], dk_update[D];
  for (int i = 0; i < D; ++i) {
    float dq = 0, dk = 0;
    for (int j = 0; j < D; ++j) {
      const float x = dS[i][j] + qt[i] * dot[j];
      dS[i][j] = x;
      du[j] += kt[i] * x;
      dq += (c.state[r][i][j] + kt[i] * u[j]) * dot[j];
      dk += x * u[j];
    }
    d.q[row * D + i] = dq;
    dk_update[i] = dk;
  }
  float d_beta = 0;
  for (int j = 0; j < D; ++j) {
    d_beta += du[j] * (vt[j] - c.predicted[r][j]);
    d.v[row * D + j] = beta[row] * du[j];
    dp[j] = -beta[row] * du[j];
  }
  d.beta[row] = d_beta;
  for (int i = 0; i < D; ++i) {
    float dk = 0, d_log = 0;
    for (int j = 0; j < D; ++j) {
      const float x = dS[i][j] + kt[i] * dp[j];
      dk += c.state[r][i][j] * dp[j];
      d_log += x * c.state[r][i][j];
      dS[i][j] = x * at[i];
    }
    d.k[row * D + i] = dk_update[i] + dk;
    d.log_decay[row * D + i] = d_log;
  }
}

template <int D>
void kda_backward(Shape s, const float* q, const float* k, const float* v, const float* decay,
                  const float* beta, const float* checkpoints, const float* d_out, Grads d) {
#pragma omp parallel for schedule(static)
  for (int bh = 0; bh < s.batch * s.heads; ++bh) {
    static thread_local ChunkStates<D> states;
    const int b = bh / s.heads, h = bh % s.heads;
    alignas(64) float dS[D][D] = {};
    for (int n = s.chunks() - 1; n >= 0; --n) {
      const int t0 = n * kChunk, count = std::min(kChunk, s.length - t0);
      const float* start = checkpoints + ((size_t)bh * s.chunks() + n) * D * D;
      states.recompute(start, s, b, h, t0, count, k, v, decay, beta);
      for (int r = count - 1; r >= 0; --r)
        kda_backward_token<D>(states, r, s.row(b, t0 + r, h), dS, q, k, v, decay, beta, d_out, d);
    }
  }
}

// exp with a relative error of about 2e-7, written so that the compiler can vectorise it.
inline float fast_exp(float x) {
  x = std::min(std::max(x, -87.0f), 87.0f);
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  p = std::fma(p * r, r, r) + 1.0f;
  const int bits = ((int)n + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// z[c] = sum_i w[3 - i][c] * x[t - i][c], the convolution before SiLU at one token.
void convolve(const float* x, const float* w, int t, int width, float* z) {
  for (int c = 0; c < width; ++c) z[c] = w[3 * width + c] * x[c];
  for (int i = 1; i < kTaps && i <= t; ++i)
    for (int c = 0; c < width; ++c) z[c] += w[(3 - i) * width + c] * x[c - i * width];
}

template <typename F>
ffi::Error dispatch_dim(int dim, F&& run) {
  switch (dim) {
    case 16: run(std::integral_constant<int, 16>()); break;
    case 32: run(std::integral_constant<int, 32>()); break;
    case 64: run(std::integral_constant<int, 64>()); break;
    default: return ffi::Error::InvalidArgument("head_dim must be 16, 32 or 64");
  }
  return ffi::Error::Success();
}

Shape shape_of(const Input& q) {
  auto d = q.dimensions();
  return {(int)d[0], (int)d[1], (int)d[2]};
}

ffi::Error KdaForwardImpl(Input q, Input k, Input v, Input decay, Input beta, Output o,
                          Output checkpoints) {
  return dispatch_dim(q.dimensions()[3], [&](auto dim) {
    kda_forward<dim()>(shape_of(q), q.typed_data(), k.typed_data(), v.typed_data(),
                       decay.typed_data(), beta.typed_data(), o->typed_data(),
                       checkpoints->typed_data());
  });
}

ffi::Error KdaBackwardImpl(Input q, Input k, Input v, Input decay, Input beta, Input checkpoints,
                           Input d_out, Output dq, Output dk, Output dv, Output d_log,
                           Output d_beta) {
  return dispatch_dim(q.dimensions()[3], [&](auto dim) {
    kda_backward<dim()>(shape_of(q), q.typed_data(), k.typed_data(), v.typed_data(),
                        decay.typed_data(), beta.typed_data(), checkpoints.typed_data(),
                        d_out.typed_data(),
                        {dq->typed_data(), dk->typed_data(), dv->typed_data(),
                         d_log->typed_data(), d_beta->typed_data()});
  });
}

ffi::Error ConvForwardImpl(Input x, Input w, Output y) {
  auto d = x.dimensions();
  const int batch = d[0], length = d[1], width = d[2];
#pragma omp parallel for schedule(static)
  for (int b = 0; b < batch; ++b)
    for (int t = 0; t < length; ++t) {
      const size_t at = ((size_t)b * length + t) * width;
      float* yt = y->typed_data() + at;
      convolve(x.typed_data() + at, w.typed_data(), t, width, yt);
      for (int c = 0; c < width; ++c) yt[c] *= sigmoid(yt[c]);
    }
  return ffi::Error::Success();
}

// One sequence: dz of every token first, then dx and this sequence's share of dw.
void conv_backward_sequence(const float* x, const float* w, const float* dy, int length, int width,
                            float* dz, float* dx, float* dw) {
  std::memset(dw, 0, sizeof(float) * kTaps * width);
  for (int t = 0; t < length; ++t) {
    const float *xt = x + (size_t)t * width, *dyt = dy + (size_t)t * width;
    float* zt = dz + (size_t)t * width;
    convolve(xt, w, t, width, zt);
    for (int c = 0; c < width; ++c) {
      const float s = sigmoid(zt[c]);
      zt[c] = dyt[c] * s * (1.0f + zt[c] * (1.0f - s));
    }
    for (int i = 0; i < kTaps && i <= t; ++i)
      for (int c = 0; c < width; ++c) dw[(3 - i) * width + c] += zt[c] * xt[c - i * width];
  }
  for (int t = 0; t < length; ++t) {
    float* dxt = dx + (size_t)t * width;
    const float* zt = dz + (size_t)t * width;
    for (int c = 0; c < width; ++c) dxt[c] = w[3 * width + c] * zt[c];
    for (int i = 1; i < kTaps && t + i < length; ++i)
      for (int c = 0; c < width; ++c) dxt[c] += w[(3 - i) * width + c] * zt[c + i * width];
  }
}

ffi::Error ConvBackwardImpl(Input x, Input w, Input dy, Output dx, Output dw) {
  auto d = x.dimensions();
  const int batch = d[0], length = d[1], width = d[2];
  std::vector<float> shares((size_t)batch * kTaps * width);
#pragma omp parallel
  {
    std::vector<float> dz((size_t)length * width);
#pragma omp for schedule(static)
    for (int b = 0; b < batch; ++b) {
      const size_t at = (size_t)b * length * width;
      conv_backward_sequence(x.typed_data() + at, w.typed_data(), dy.typed_data() + at, length,
                             width, dz.data(), dx->typed_data() + at,
                             shares.data() + (size_t)b * kTaps * width);
    }
  }
  float* total = dw->typed_data();
  std::memset(total, 0, sizeof(float) * kTaps * width);
  for (int b = 0; b < batch; ++b)
    for (int c = 0; c < kTaps * width; ++c) total[c] += shares[(size_t)b * kTaps * width + c];
  return ffi::Error::Success();
}

}  // namespace

#define FIVE_ARGS Arg<Input>().Arg<Input>().Arg<Input>().Arg<Input>().Arg<Input>()
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaForward, KdaForwardImpl,
                              ffi::Ffi::Bind().FIVE_ARGS.Ret<Input>().Ret<Input>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(KdaBackward, KdaBackwardImpl,
                              ffi::Ffi::Bind().FIVE_ARGS.Arg<Input>().Arg<Input>()
                                  .Ret<Input>().Ret<Input>().Ret<Input>().Ret<Input>()
                                  .Ret<Input>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ConvForward, ConvForwardImpl,
                              ffi::Ffi::Bind().Arg<Input>().Arg<Input>().Ret<Input>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ConvBackward, ConvBackwardImpl,
                              ffi::Ffi::Bind().Arg<Input>().Arg<Input>().Arg<Input>()
                                  .Ret<Input>().Ret<Input>());
