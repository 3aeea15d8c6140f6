"""How the pocket models were made: a small invented world, a tokenizer, training, export and evaluation.

python -m recipes.make_corpus --sample 3
"""
