"""Polynomials of the elementary functions: one table for every backend that has no such functions of its own.

They are minimax (Remez's exchange; for `float` the coefficients were rounded one at a time from the lowest,
the others fitted again by linear programming). Each is fitted to the function's relative error on the whole
of its interval; the constant comes first:

| name | is the polynomial of | interval | relative error |
| --- | --- | --- | --- |
| EXP | (e^r - 1 - r) / r^2 | abs(r) <= ln(2)/2 | 2^-31.1 |
| LOG | (log(1 + f) - f) / f^2 | sqrt(1/2) <= 1 + f <= sqrt(2) | 2^-27.8 |
| TANH | (tanh(x) - x) / x^3, in x^2 | abs(x) <= 0.5625 | 2^-29.4 |
| ERF | -(log(erfc(t)) + t) / t, in -t | 0 <= t <= 3.95, beyond which erf rounds to 1 | 2^-27.8 of erf |
"""

# The leading 1 of log(erfc(t)) = -(t + t*ERF(-t)) is apart: 2/sqrt(pi) as a float is half a place off.
ERF_END = 3.95
TANH_SMALL = 0.5625  # up to here tanh's polynomial is fitted, from here its other formula loses nothing

EXP = (
    0.5, 0.1666666567325592, 0.04166649281978607, 0.008333544246852398, 0.0013932340079918504,
    0.0001976343774003908,
)  # fmt: skip
LOG = (
    -0.49999988079071045, 0.33333325386047363, -0.25001609325408936, 0.20002004504203796,
    -0.16608411073684692, 0.14180852472782135, -0.13248062133789062, 0.12912946939468384,
    -0.07619082927703857,
)  # fmt: skip
TANH = (
    -0.3333331346511841, 0.13332436978816986, -0.053835757076740265, 0.021000375971198082,
    -0.006169613916426897,
)  # fmt: skip
ERF = (
    0.12837916612625122, -0.6366195678710938, 0.10277630388736725, 0.019147824496030807,
    -0.00016949418932199478, -0.0016756574623286724, -0.0006373475189320743, -0.00011885527055710554,
    -9.387120371684432e-06,
)  # fmt: skip
