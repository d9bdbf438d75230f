"""Wire formats: the representation of shards on the network after a step of the sharded optimizer.

Each rank owns a contiguous shard of a flat parameter buffer, and keeps a *master* copy of that
shard in full precision, which its optimizer steps. A wire sends all shards to all ranks in a
narrow format. Afterwards the visible parameters (the flat buffer) have the same bits on all ranks,
the owner too; the masters keep the precision that the format loses.
"""
