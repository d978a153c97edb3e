// Coded weights with AVX-512F: decodes to float32, for inputs of any element type.
#include <immintrin.h>

#include "coded.h"

#pragma GCC push_options
#pragma GCC target("avx512f")

namespace heteroinfer {
namespace {

#include "lanes_avx512.h"
#include "element_rows.h"
#include "coded_float.h"
#include "coded_rows.h"

constexpr int kRows = 12;

}  // namespace

const CodedKernel kCodedAvx512 = {
    "avx512f", kRows, 4, false, pack_float_rows,
    {multiply_coded<FloatDot, FloatBf16, kRows>, multiply_coded<FloatDot, FloatF16, kRows>,
     multiply_coded<FloatDot, FloatFp8, kRows>, multiply_coded<FloatDot, FloatInt8, kRows>,
     multiply_coded<FloatDot, FloatInt4, kRows>, multiply_coded<FloatDot, FloatFp4, kRows>},
    {},
    {}};
const RowsKernel kRowsAvx512 = {add_scaled_rows, store_elements, activate_elements, weighted_elements};

}  // namespace heteroinfer

#pragma GCC pop_options
