"""Arithmetic of a CPU's kernel in LLVM IR, for WebAssembly, which lacks two parts of it.

A CPU's kernel multiplies and adds with one rounding, and takes denormal numbers as zero. WebAssembly has no
such instruction and no such mode. Here no sum, product or quotient is denormal, and of operands that are not,
all results have the same bits; only one that is smaller than the smallest normal number by less than half of
its last place may be that number here and zero there.
"""

FUNCTIONS = {name: name for name in ("add", "sub", "mul", "div")} | {
    "fma": "fused",
    "rem": "remainder",
}
"""The functions of ARITHMETIC, and `remainder`, by the operations that they do."""

_FLUSHED = """
define internal float @{name}(float %a, float %b) alwaysinline #0 {{
  %exact = f{name} float %a, %b
  %result = call float @flushed(float %exact)
  ret float %result
}}
"""

# The product of two floats is exact in a double, and its sum with the third is rounded. To round that once
# more, to a float, differs from rounding once only if the sum lies just between two floats: then the lost
# part of the sum decides, and the double next to it on that side (Boldo and Melquiond, 2008).
ARITHMETIC = """
define internal float @flushed(float %x) alwaysinline #0 {
  %bits = bitcast float %x to i32
  %exponent = and i32 %bits, 2139095040
  %denormal = icmp eq i32 %exponent, 0
  %zero = and i32 %bits, -2147483648
  %chosen = select i1 %denormal, i32 %zero, i32 %bits
  %result = bitcast i32 %chosen to float
  ret float %result
}
define internal double @beside(double %p, double %z, double %sum) alwaysinline #0 {
entry:
  %added = fsub double %sum, %p
  %kept = fsub double %sum, %added
  %first = fsub double %p, %kept
  %second = fsub double %z, %added
  %lost = fadd double %first, %second
  %some = fcmp one double %lost, 0.0
  br i1 %some, label %move, label %stay
move:
  %up = fcmp ogt double %lost, 0.0
  %positive = fcmp ogt double %sum, 0.0
  %same = icmp eq i1 %up, %positive
  %by = select i1 %same, i64 1, i64 -1
  %bits = bitcast double %sum to i64
  %moved = add i64 %bits, %by
  %result = bitcast i64 %moved to double
  ret double %result
stay:
  ret double %sum
}
define internal float @fused(float %a, float %b, float %c) noinline #0 {
entry:
  %x = fpext float %a to double
  %y = fpext float %b to double
  %z = fpext float %c to double
  %p = fmul double %x, %y
  %sum = fadd double %p, %z
  %bits = bitcast double %sum to i64
  %low = and i64 %bits, 536870911
  %between = icmp eq i64 %low, 268435456
  br i1 %between, label %rare, label %done
rare:
  %other = call double @beside(double %p, double %z, double %sum)
  br label %done
done:
  %rounded = phi double [%sum, %entry], [%other, %rare]
  %exact = fptrunc double %rounded to float
  %result = call float @flushed(float %exact)
  ret float %result
}
""" + "".join(_FLUSHED.format(name=name) for name in ("add", "sub", "mul", "div"))
"""IR of functions of floats: `add`, `sub`, `mul` and `div` of two, and `fused`, `a * b + c` of three."""
