"""The remainder of two floats in LLVM IR: for processors whose own is not exact, or that have none.

It is C's fmod: the sign is that of x, and x rem 0, inf rem y and NaN are NaN. Both mantissas become integers,
and the remainder is found by long division, one bit of the quotient in each round.
"""

REMAINDER = """
declare i32 @llvm.ctlz.i32(i32, i1)
define internal {i32, i32} @mantissa(i32 %bits) #0 {
  %exponent = lshr i32 %bits, 23
  %fraction = and i32 %bits, 8388607
  %implied = or i32 %fraction, 8388608
  %zeros = call i32 @llvm.ctlz.i32(i32 %fraction, i1 false)
  %places = sub i32 %zeros, 8
  %shifted = shl i32 %fraction, %places
  %below = sub i32 1, %places
  %denormal = icmp eq i32 %exponent, 0
  %number = select i1 %denormal, i32 %shifted, i32 %implied
  %power = select i1 %denormal, i32 %below, i32 %exponent
  %one = insertvalue {i32, i32} poison, i32 %number, 0
  %both = insertvalue {i32, i32} %one, i32 %power, 1
  ret {i32, i32} %both
}
define internal float @remainder(float %x, float %y) #0 {
entry:
  %xbits = bitcast float %x to i32
  %ybits = bitcast float %y to i32
  %sign = and i32 %xbits, -2147483648
  %xsize = and i32 %xbits, 2147483647
  %ysize = and i32 %ybits, 2147483647
  %infinite = icmp uge i32 %xsize, 2139095040
  %missing = icmp ugt i32 %ysize, 2139095040
  %nothing = icmp eq i32 %ysize, 0
  %bad = or i1 %infinite, %missing
  %invalid = or i1 %bad, %nothing
  br i1 %invalid, label %nan, label %valid
nan:
  ret float 0x7FF8000000000000
valid:
  %less = icmp ult i32 %xsize, %ysize
  br i1 %less, label %whole, label %divide
whole:
  ret float %x
divide:
  %xboth = call {i32, i32} @mantissa(i32 %xsize)
  %yboth = call {i32, i32} @mantissa(i32 %ysize)
  %first = extractvalue {i32, i32} %xboth, 0
  %divisor = extractvalue {i32, i32} %yboth, 0
  %xpower = extractvalue {i32, i32} %xboth, 1
  %power = extractvalue {i32, i32} %yboth, 1
  br label %round
round:
  %left = phi i32 [%first, %divide], [%doubled, %again]
  %at = phi i32 [%xpower, %divide], [%next, %again]
  %fits = icmp uge i32 %left, %divisor
  %taken = select i1 %fits, i32 %divisor, i32 0
  %rest = sub i32 %left, %taken
  %more = icmp sgt i32 %at, %power
  br i1 %more, label %again, label %done
again:
  %doubled = shl i32 %rest, 1
  %next = sub i32 %at, 1
  br label %round
done:
  %zeros = call i32 @llvm.ctlz.i32(i32 %rest, i1 false)
  %places = sub i32 %zeros, 8
  %exponent = sub i32 %power, %places
  %normal = icmp sgt i32 %exponent, 0
  %filled = shl i32 %rest, %places
  %fraction = and i32 %filled, 8388607
  %raised = shl i32 %exponent, 23
  %joined = or i32 %raised, %fraction
  %up = sub i32 %power, 1
  %down = sub i32 1, %power
  %lifted = shl i32 %rest, %up
  %lowered = lshr i32 %rest, %down
  %high = icmp sgt i32 %power, 0
  %small = select i1 %high, i32 %lifted, i32 %lowered
  %size = select i1 %normal, i32 %joined, i32 %small
  %zero = icmp eq i32 %rest, 0
  %kept = select i1 %zero, i32 0, i32 %size
  %signed = or i32 %kept, %sign
  %result = bitcast i32 %signed to float
  ret float %result
}
"""
"""IR of `float @remainder(float, float)`."""
