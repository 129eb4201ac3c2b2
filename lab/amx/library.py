"""ab.cpp's functions, from libab.so in the working directory."""

import ctypes as C
import os

P, L, I = C.c_void_p, C.c_int64, C.c_int
ab = C.CDLL(os.path.abspath("libab.so"))
ab.ab_case.restype, ab.ab_case.argtypes = P, [I, I, L, L, L, L, L, L, I, L, C.c_char_p, I, I]
ab.ab_bind.restype, ab.ab_bind.argtypes = P, [P, C.c_char_p, C.c_char_p]
for function in (ab.ab_run, ab.ab_isa, ab.ab_unbind, ab.ab_free):
    function.argtypes = [P]
ab.ab_output.argtypes = [P, I, P, L]
ab.ab_fma.restype = ab.ab_amx.restype = ab.ab_amx_sample.restype = C.c_double
