"""UniLM, a BERT that generates text, as a transformers model class.

Importing this package registers the model type "unilm" with AutoConfig and AutoModelForSeq2SeqLM.

Sources: Dong et al. 2019 (UniLM); Bao et al. 2021 (s2s-ft).
"""

from transformers import AutoConfig, AutoModelForSeq2SeqLM

from fastgen.unilm.config import UniLMConfig
from fastgen.unilm.loading import load
from fastgen.unilm.model import UniLMForConditionalGeneration

__all__ = ["UniLMConfig", "UniLMForConditionalGeneration", "load"]

AutoConfig.register("unilm", UniLMConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(UniLMConfig, UniLMForConditionalGeneration, exist_ok=True)
