"""What a script of your own calls: `data_parallel`, `parallelize` and `ShardedOptimizer`.

They cannot be in `strategies/`: strategy `auto` asks `cost/`, which imports that folder.
"""
