r"""How `math_verify` reads answers. No torch, no sympy until an expression needs it: it runs in a process of its own (child.py).

**The answer of a response** (final.py). Only text after the last `</think>` counts, and nothing while thinking is not over. The last
`\boxed{}`, `\fbox{}` or `<answer>` tag decides; without one the last "the answer is ...", "Answer: ..." or `#### ...`; without these
the last sentence (narrow.py). One answer is compared, never whichever part of a list fits: "5 or 6" is not 5. Boxes joined by "and",
"or" or a comma are one answer in parts. Text after an unfinished box does not count.

**Labels** (labels.py) are text or finite numbers; numbers keep every digit. A solution as label gives its own final answer (`####`, a box).
Missing values (null, "", N/A, nan), booleans, lists and dicts are refused.

**Comparison** (compare.py), by the kind of the label:

- choice: one letter A to J, in brackets, bold or lower case, with or without the option's text.
- number (quantity.py): exact, whatever the notation: 1,000; 1.5 \times 10^{20}; 1 3/4; 50%; $18.90; full-width and superscript digits. A
  unit, currency or percent sign may be missing on one side, but must not differ. 50% is 0.5, and 50 where the label says so. A decimal
  stands for 1/3 or a root from five right digits on.
- words (words.py): as text but for capitals, articles and punctuation, never as products of letters. Yes and no may be followed by more.
- dates, times of day and ratios: by their parts; times with or without AM and PM.
- parts (structure.py): lists, sets and "or" in any order; tuples, intervals and matrices in order; x > 3 is (3, oo); x = 5 is 5.
- anything else is an expression (symbolic.py): read by math-verify, compared as a function at exact points.
"""
