"""The toolkit-independent decoding engine.

It holds the decode loop, the searches, the KV cache, logits transforms and batching.
"""
