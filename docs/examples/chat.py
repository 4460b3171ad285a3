"""Tokens from a language model on a device: python chat.py llama.pte"""

import sys

from etfarm.client import Farm

with Farm() as farm, farm.session(sys.argv[1]) as session:
    for token in session.generate([1, 15, 27], 32):
        print(token, end=" ", flush=True)
    answer = session.generate([4, 8], 32, stop_tokens="eos").result()
    print(answer.tokens, f"{answer.tokens_per_s:.1f} tokens/s")
