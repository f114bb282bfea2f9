"""A script to audit: a decoder of nanoGPT's size for characters (10.7 million weights), trained with DDP on one host.

    python benchmarks/small_gpt.py --world_size 2 --rank R --output rankR.json

Its text is made up.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHARACTERS, CONTEXT, WIDTH, HEADS, LAYERS = 65, 256, 384, 6, 6


class Decoder(nn.Module):
    """Pre-norm blocks with a causal mask; the outputs share the embedding's weights."""

    def __init__(self):
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text):
        """Logits by character, (batch, context, characters), of a batch of texts, (batch, context)."""
        hidden = self.characters(text) + self.places.weight
        return self.blocks(hidden, mask=self.mask, is_causal=True) @ self.characters.weight.T


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world_size", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--master_port", type=int, default=6585)
    parser.add_argument("--max_steps", type=int, default=16)
    parser.add_argument("--total_batch_size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", required=True, help="write this rank's losses and seconds there, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(42)
    meeting = f"tcp://127.0.0.1:{args.master_port}"
    dist.init_process_group("gloo", init_method=meeting, world_size=args.world_size, rank=args.rank)
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(args.rank)
    losses, seconds = [], []
    for _ in range(args.max_steps):
        began = time.time()
        text = torch.randint(CHARACTERS, (args.total_batch_size // args.world_size, CONTEXT + 1), generator=draws)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.time() - began)
    with open(args.output, "w", encoding="utf-8") as file:
        json.dump({"losses": losses, "seconds": seconds}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
