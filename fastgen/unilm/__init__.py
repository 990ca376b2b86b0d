"""UniLM: a BERT that writes, as a model class of transformers' own kind (Dong et al. 2019; s2s-ft, Bao et al. 2021).

Importing it makes the type "unilm" known to AutoConfig and AutoModelForSeq2SeqLM.
"""

from transformers import AutoConfig, AutoModelForSeq2SeqLM

from fastgen.unilm.config import UniLMConfig
from fastgen.unilm.loading import load
from fastgen.unilm.model import UniLMForConditionalGeneration

__all__ = ["UniLMConfig", "UniLMForConditionalGeneration", "load"]

AutoConfig.register("unilm", UniLMConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(UniLMConfig, UniLMForConditionalGeneration, exist_ok=True)
