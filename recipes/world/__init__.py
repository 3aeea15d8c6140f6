"""A small invented world that can be talked about in English and Chinese without end.

Every text is drawn from a seeded generator; nothing is quoted.

    from recipes.world.mixture import conversation
    conversation(random.Random(7))
"""
