"""Classes of models in vLLM 0.32.0 and transformers 5.19.0, by what vLLM does with them. Pure; data.

Written by `python -m tests.shapes.architectures`.
"""

from typing import Final

from heteroinfer_contract.word_table import word_pairs, word_set

GENERATES: Final = word_set(
    """
    AXK1ForCausalLM AfmoeForCausalLM ApertusForCausalLM AriaForConditionalGeneration
    AudioFlamingo3ForConditionalGeneration BagelForConditionalGeneration BailingMoeForCausalLM
    BailingMoeV2ForCausalLM BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM
    BailingMoeV3VLForConditionalGeneration BeeForConditionalGeneration Blip2ForConditionalGeneration
    BloomForCausalLM ChatGLMForConditionalGeneration ChatGLMModel Cohere2ForCausalLM Cohere2MoeForCausalLM
    Cohere2VisionForConditionalGeneration CohereAsrForConditionalGeneration
    CohereCompassForConditionalGeneration CohereForCausalLM Cosmos3EdgeForConditionalGeneration
    Cosmos3ForConditionalGeneration DbrxForCausalLM DeciLMForCausalLM DeepseekForCausalLM
    DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
    DeepseekV3ForCausalLM DeepseekV41ForCausalLM DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration
    DeepseekVLV2ForCausalLM DiffusionGemmaForBlockDiffusion Dots3NoteForCausalLM DotsOCRForCausalLM
    Eagle2_5_VLForConditionalGeneration Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    Ernie4_5_VLMoeForConditionalGeneration Exaone4ForCausalLM Exaone4_5_ForConditionalGeneration
    ExaoneForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM
    FalconMambaForCausalLM FireRedASR2ForConditionalGeneration FunASRForConditionalGeneration
    FunAudioChatForConditionalGeneration GLM4VForCausalLM GPT2LMHeadModel GPTJForCausalLM Gemma2ForCausalLM
    Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma3nForConditionalGeneration
    Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GemmaForCausalLM
    Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm4vForConditionalGeneration
    Glm4vMoeForConditionalGeneration Glm5NextForCausalLM Glm5NextForConditionalGeneration
    GlmAsrForConditionalGeneration GlmMoeDsaForCausalLM GlmOcrForConditionalGeneration GptOssForCausalLM
    Granite4VisionForConditionalGeneration GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM
    GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration H2OVLChatModel
    HCXVisionV2ForCausalLM HYV3ForCausalLM HYV4ForCausalLM HfMoondream HrmTextForCausalLM
    HyperCLOVAXForCausalLM IQuestCoderForCausalLM IQuestLoopCoderForCausalLM Idefics3ForConditionalGeneration
    InklingForCausalLM InklingForConditionalGeneration InternLM2ForCausalLM InternLM3ForCausalLM
    InternS1ForConditionalGeneration InternS1ProForConditionalGeneration
    InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration InternVLChatModel
    InternVLForConditionalGeneration IsaacForConditionalGeneration JambaForCausalLM K2HorizonForCausalLM
    KananaVForConditionalGeneration KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration
    KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration KimiLinearForCausalLM
    KimiVLForConditionalGeneration LLaMAForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM
    Lfm2VlForConditionalGeneration LightOnOCRForConditionalGeneration Llama4ForCausalLM
    Llama4ForConditionalGeneration LlamaForCausalLM Llama_Nemotron_Nano_VL LlavaForConditionalGeneration
    LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration
    LlavaOnevision2ForConditionalGeneration LlavaOnevisionForConditionalGeneration LongcatFlashForCausalLM
    LongcatFlashNgramForCausalLM Mamba2ForCausalLM MambaForCausalLM MiDashengLMModel MiMoForCausalLM
    MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiMoV2OmniForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM
    MiniCPMO MiniCPMV MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
    MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration
    Ministral3ForCausalLM Mistral3ForConditionalGeneration MistralForCausalLM MistralLarge3ForCausalLM
    MixtralForCausalLM Molmo2ForConditionalGeneration MolmoForCausalLM Moondream3ForCausalLM
    MoonshotKimiaForCausalLM MossAudioModel MossTranscribeDiarizeForConditionalGeneration
    MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration NVLM_D NemotronForCausalLM NemotronHForCausalLM
    NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
    NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 NemotronParseForConditionalGeneration
    OPTForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM OpenCUAForConditionalGeneration
    OpenPanguVLForConditionalGeneration OpenVLAForActionPrediction OrionForCausalLM Ovis Ovis2_5
    Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM PaddleOCRVLForConditionalGeneration
    PaliGemmaForConditionalGeneration PanguEmbeddedForCausalLM PanguProMoEV2ForCausalLM
    PanguUltraMoEForCausalLM Param2MoEForCausalLM Phi3ForCausalLM Phi3VForCausalLM Phi4ForCausalLMV
    Phi4MMForCausalLM PhiMoEForCausalLM PixtralForConditionalGeneration Plamo3ForCausalLM
    QianfanOCRForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel
    Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3OmniMoeForConditionalGeneration
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration RForConditionalGeneration Rnj1ForCausalLM
    SarvamMLAForCausalLM SarvamMoEForCausalLM SkyworkR1VChatModel SmolVLMForConditionalGeneration
    SolarForCausalLM StableLmForCausalLM Step1ForCausalLM Step3TextForCausalLM Step3VLForConditionalGeneration
    Step3p5ForCausalLM Step3p7ForConditionalGeneration StepVLForConditionalGeneration TeleChat2ForCausalLM
    TeleChat3ForCausalLM TeleFLMForCausalLM UltravoxModel UnlimitedOCRForCausalLM
    VoxtralForConditionalGeneration VoxtralRealtimeGeneration WhisperForConditionalGeneration
    Zamba2ForCausalLM
    """
)
"""Classes in vLLM that generate text."""
BY_TRANSFORMERS: Final = word_set(
    """
    AXK2ForCausalLM ArceeForCausalLM AriaTextForCausalLM AyaVisionForConditionalGeneration BambaForCausalLM
    BartForCausalLM BertGenerationDecoder BertLMHeadModel BigBirdForCausalLM BigBirdPegasusForCausalLM
    BioGptForCausalLM BitNetForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM
    BlipForConditionalGeneration BltForCausalLM CTRLLMHeadModel CamembertForCausalLM
    ChameleonForConditionalGeneration CodeGenForCausalLM CohereCompassForCausalLM
    Cosmos3OmniForConditionalGeneration CpmAntForCausalLM CwmForCausalLM Data2VecTextForCausalLM
    DeepseekOcr2ForConditionalGeneration DeepseekVLForConditionalGeneration
    DeepseekVLHybridForConditionalGeneration DiffLlamaForCausalLM DogeForCausalLM Dots1ForCausalLM
    ElectraForCausalLM Emu3ForCausalLM Emu3ForConditionalGeneration ErnieForCausalLM EvollaForProteinText2Text
    FastVlmForConditionalGeneration FlexOlmoForCausalLM Florence2ForConditionalGeneration FuyuForCausalLM
    GPTBigCodeForCausalLM GPTNeoForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM
    Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM Gemma4UnifiedForCausalLM GitForCausalLM
    Glm46VForConditionalGeneration GlmForCausalLM GotOcr2ForConditionalGeneration HeliumForCausalLM
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration
    HyperCLOVAXVisionV2ForConditionalGeneration Idefics2ForConditionalGeneration IdeficsForVisionText2Text
    InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration Jais2ForCausalLM
    JanusForConditionalGeneration JetMoeForCausalLM Kimi_K25ForConditionalGeneration
    Kosmos2ForConditionalGeneration Kosmos2_5ForConditionalGeneration LightOnOcrForConditionalGeneration
    MBartForCausalLM MarianForCausalLM MegatronBertForCausalLM MellumForCausalLM MiniMaxForCausalLM
    MiniMaxM3VLForCausalLM MinistralForCausalLM Mistral4ForCausalLM MllamaForCausalLM
    MllamaForConditionalGeneration ModernBertDecoderForCausalLM MoshiForCausalLM MptForCausalLM
    MusicgenForCausalLM MusicgenMelodyForCausalLM MvpForCausalLM NanbeigeForCausalLM NanoChatForCausalLM
    Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OpenAIGPTLMHeadModel Ovis2ForConditionalGeneration
    PI0ForConditionalGeneration PLBartForCausalLM PPFormulaNetForConditionalGeneration PegasusForCausalLM
    PerceptionLMForConditionalGeneration PersimmonForCausalLM Phi4MultimodalForCausalLM PhiForCausalLM
    PhimoeForCausalLM Pix2StructForConditionalGeneration ProphetNetForCausalLM
    Qwen2_5OmniThinkerForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration
    RecurrentGemmaForCausalLM ReformerModelWithLMHead RemBertForCausalLM RoCBertForCausalLM
    RoFormerForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM RwkvForCausalLM SeedOssForCausalLM
    SmolLM3ForCausalLM SolarOpenForCausalLM Starcoder2ForCausalLM T5Gemma2ForConditionalGeneration
    TrOCRForCausalLM UdopForConditionalGeneration VaultGemmaForCausalLM VibeVoiceAsrForConditionalGeneration
    VideoLlama3ForConditionalGeneration VideoLlavaForConditionalGeneration VipLlavaForConditionalGeneration
    VisionEncoderDecoderModel WhisperForCausalLM XGLMForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM
    XLMWithLMHeadModel XLNetLMHeadModel XmodForCausalLM YoutuForCausalLM ZambaForCausalLM ZayaForCausalLM
    xLSTMForCausalLM
    """
)
"""Classes that vLLM lacks but transformers has; vLLM runs the class of transformers."""
OTHER_TASKS: Final = word_set(
    """
    BailingMoeV25MTPModel BailingMoeV3MTPModel BertForMaskedLM BertForSequenceClassification
    BertForTokenClassification BertModel BertSpladeSparseEmbeddingModel BgeM3EmbeddingModel CLIPModel
    ClefOmniForJointSchema ColBERTJinaRobertaModel ColBERTLfm2Model ColBERTModernBertModel
    ColModernVBertForRetrieval ColPaliForRetrieval ColQwen3 ColQwen3_5 DFlash2DraftModel DFlashDraftModel
    DFlashLagunaForCausalLM DFlashMuseGlimmerAssistantModel DSparkDraftModel DSparkV41DraftModel
    DeepSeekMTPModel DeepSeekV4MTPModel DeepseekV32MTPModel DeepseekV3BidirectionalModel Dots3NoteMTPModel
    Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM
    Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3ForCausalLM Eagle3Qwen3vlForCausalLM EagleCohereForCausalLM
    EagleDeepSeekMTPModel EagleLlama4ForCausalLM EagleLlamaForCausalLM EagleMiniCPMForCausalLM
    EagleMistralForCausalLM EagleMistralLarge3ForCausalLM EmbeddingGemma2Model ErnieMTPModel Exaone4_5_MTP
    ExaoneMoeMTP ExtractHiddenStatesModel GPT2ForSequenceClassification Gemma2Model Gemma3TextModel
    Gemma4DSparkModel Gemma4MTPModel Glm4MoeLiteMTPModel Glm4MoeMTPModel Glm5NextMTPModel GlmOcrMTPModel
    GteModel GteNewForSequenceClassification GteNewModel HF_ColBERT HYV3MTPModel HYV4MTPModel InklingMTPModel
    InternLM2ForRewardModel InternS2MobiusMTP JambaForSequenceClassification JinaEmbeddingsV5Model
    JinaForRanking JinaVLForRanking K3DSparkModel KimiK3MTPModel LiLiCorrDraftModel
    LlamaBidirectionalForSequenceClassification LlamaBidirectionalModel LlamaForCausalLMEagle3 LlamaModel
    LlamaNemotronVLForSequenceClassification LlamaNemotronVLModel LongCatFlashMTPModel MedusaModel
    MiMoMTPModel MiMoV2MTPModel MiMoV2OmniMTPModel MiniMaxM3MTP MistralModel
    ModernBertForSequenceClassification ModernBertForTokenClassification ModernBertModel
    MuseGlimmerAssistantModel NemotronHMTPModel NomicBertModel OpenAIPrivacyFilterForTokenClassification
    OpenPanguMTPModel OpsColQwen3Model PEagleDraftModel PeagleLlamaForCausalLM PeagleQwen3ForCausalLM
    Qwen2ForProcessRewardModel Qwen2ForRewardModel Qwen2Model Qwen3ASRForcedAlignerForTokenClassification
    Qwen3DSparkModel Qwen3NextMTP Qwen3OmniDSparkModel Qwen3VLNemotronEmbedModel Qwen3_5MTP Qwen3_5MoeMTP
    Qwen4ExpMTP RobertaForMaskedLM RobertaForSequenceClassification RobertaForTokenClassification RobertaModel
    SiglipModel Step3p5MTP Terratorch TransformersEmbeddingModel TransformersForCausalLM
    TransformersForSequenceClassification TransformersMoEEmbeddingModel TransformersMoEForCausalLM
    TransformersMoEForSequenceClassification TransformersMultiModalEmbeddingModel
    TransformersMultiModalForCausalLM TransformersMultiModalForSequenceClassification
    TransformersMultiModalMoEForCausalLM VoyageQwen3BidirectionalEmbedModel
    XLMRobertaForSequenceClassification XLMRobertaForTokenClassification XLMRobertaModel
    """
)
"""Classes in vLLM that give embeddings or scores, or draft tokens for another model."""
ENDINGS: Final = word_pairs(
    """
    ForCausalLM generate ForConditionalGeneration generate ChatModel generate LMHeadModel generate
    ForTextEncoding pooling EmbeddingModel pooling ForSequenceClassification pooling
    ForTokenClassification pooling ForAudioClassification pooling ForImageClassification pooling
    ForVideoClassification pooling ClassificationModel pooling ForRewardModeling pooling RewardModel pooling
    Model pooling
    """
)
"""End of a class name -> task that vLLM assumes for the class; the first end that fits decides."""
UNTIL: Final = word_pairs(
    """
    AquilaForCausalLM 0.24.0 AquilaModel 0.24.0 ArcticForCausalLM 0.28.0
    AyaVisionForConditionalGeneration 0.24.0 BaiChuanForCausalLM 0.23.0 BaichuanForCausalLM 0.23.0
    BambaForCausalLM 0.23.0 ChameleonForConditionalGeneration 0.28.0 Cheers 0.28.0
    CheersForConditionalGeneration 0.28.0 DonutForConditionalGeneration 0.10.2 Dots1ForCausalLM 0.23.0
    ErnieForSequenceClassification 0.23.0 ErnieForTokenClassification 0.23.0 ErnieModel 0.23.0
    Fairseq2LlamaForCausalLM 0.28.0 FireRedLIDForConditionalGeneration 0.28.0 FuyuForCausalLM 0.25.0
    GritLM 0.28.0 Grok1ForCausalLM 0.24.0 Grok1ModelForCausalLM 0.24.0 HCXVisionForCausalLM 0.28.0
    InternLM2VEForCausalLM 0.23.0 InternLMForCausalLM 0.23.0 JAISLMHeadModel 0.22.0 MPTForCausalLM 0.28.0
    MantisForConditionalGeneration 0.24.0 MiniMaxForCausalLM 0.23.0 MiniMaxM1ForCausalLM 0.23.0
    MiniMaxText01ForCausalLM 0.23.0 MiniMaxVL01ForConditionalGeneration 0.23.0
    MllamaForConditionalGeneration 0.10.2 MotifForCausalLM 0.10.2 MptForCausalLM 0.28.0
    MusicFlamingoForConditionalGeneration 0.24.0 OuroForCausalLM 0.26.0 PersimmonForCausalLM 0.25.0
    Phi3SmallForCausalLM 0.9.2 Phi4FlashForCausalLM 0.10.2 Phi4MultimodalForCausalLM 0.12.0
    Plamo2ForCausalLM 0.26.0 PrithviGeoSpatialMAE 0.28.0 QWenLMHeadModel 0.23.0
    QwenVLForConditionalGeneration 0.23.0 RWForCausalLM 0.28.0 StableLMEpochForCausalLM 0.28.0
    Tarsier2ForConditionalGeneration 0.23.0 TarsierForConditionalGeneration 0.24.0 TeleChatForCausalLM 0.25.0
    XverseForCausalLM 0.23.0
    """
)
"""Class that vLLM no longer serves -> the last version of vLLM that served it."""
CAUSAL_TYPES: Final = word_pairs(
    """
    afmoe AfmoeForCausalLM apertus ApertusForCausalLM arcee ArceeForCausalLM axk1 AXK1ForCausalLM
    bloom BloomForCausalLM cohere CohereForCausalLM cohere2 Cohere2ForCausalLM
    cohere2_moe Cohere2MoeForCausalLM cwm CwmForCausalLM dbrx DbrxForCausalLM
    deepseek_v2 DeepseekV2ForCausalLM deepseek_v3 DeepseekV3ForCausalLM deepseek_v32 DeepseekV32ForCausalLM
    deepseek_v4 DeepseekV4ForCausalLM ernie4_5 Ernie4_5ForCausalLM ernie4_5_moe Ernie4_5_MoeForCausalLM
    exaone4 Exaone4ForCausalLM exaone_moe ExaoneMoeForCausalLM falcon FalconForCausalLM
    falcon_h1 FalconH1ForCausalLM falcon_mamba FalconMambaForCausalLM flex_olmo FlexOlmoForCausalLM
    gemma GemmaForCausalLM gemma2 Gemma2ForCausalLM gemma3 Gemma3ForConditionalGeneration
    gemma3_text Gemma3ForCausalLM gemma3n Gemma3nForConditionalGeneration gemma3n_text Gemma3nForCausalLM
    gemma4 Gemma4ForConditionalGeneration gemma4_text Gemma4ForCausalLM
    gemma4_unified Gemma4UnifiedForConditionalGeneration glm GlmForCausalLM glm4 Glm4ForCausalLM
    glm4_moe Glm4MoeForCausalLM glm4_moe_lite Glm4MoeLiteForCausalLM glm_moe_dsa GlmMoeDsaForCausalLM
    gpt-sw3 GPT2LMHeadModel gpt2 GPT2LMHeadModel gpt_bigcode GPTBigCodeForCausalLM gpt_neox GPTNeoXForCausalLM
    gpt_oss GptOssForCausalLM gptj GPTJForCausalLM granite GraniteForCausalLM
    granite_swa GraniteSWAForCausalLM granitemoe GraniteMoeForCausalLM granitemoe_swa GraniteMoeSWAForCausalLM
    granitemoehybrid GraniteMoeHybridForCausalLM granitemoeshared GraniteMoeSharedForCausalLM
    hrm_text HrmTextForCausalLM hunyuan_v1_dense HunYuanDenseV1ForCausalLM
    hunyuan_v1_moe HunYuanMoEV1ForCausalLM hy_v3 HYV3ForCausalLM hy_v4 HYV4ForCausalLM
    hyperclovax HyperCLOVAXForCausalLM inkling_text InklingForCausalLM jais2 Jais2ForCausalLM
    jamba JambaForCausalLM kimi_linear KimiLinearForCausalLM laguna LagunaForCausalLM lfm2 Lfm2ForCausalLM
    lfm2_moe Lfm2MoeForCausalLM llama LlamaForCausalLM llama4 Llama4ForCausalLM llama4_text Llama4ForCausalLM
    longcat_flash LongcatFlashForCausalLM mamba MambaForCausalLM mamba2 Mamba2ForCausalLM
    mellum MellumForCausalLM mimo_v2_flash MiMoV2FlashForCausalLM minicpm3 MiniCPM3ForCausalLM
    minimax_m2 MiniMaxM2ForCausalLM ministral3 Ministral3ForCausalLM mistral MistralForCausalLM
    mixtral MixtralForCausalLM nemotron NemotronForCausalLM nemotron_h NemotronHForCausalLM
    olmo OlmoForCausalLM olmo2 Olmo2ForCausalLM olmo3 Olmo3ForCausalLM olmo_hybrid OlmoHybridForCausalLM
    olmoe OlmoeForCausalLM opt OPTForCausalLM phi PhiForCausalLM phi3 Phi3ForCausalLM qwen2 Qwen2ForCausalLM
    qwen2_moe Qwen2MoeForCausalLM qwen3 Qwen3ForCausalLM qwen3_5 Qwen3_5ForCausalLM
    qwen3_5_moe Qwen3_5MoeForCausalLM qwen3_5_moe_text Qwen3_5MoeForCausalLM qwen3_5_text Qwen3_5ForCausalLM
    qwen3_moe Qwen3MoeForCausalLM qwen3_next Qwen3NextForCausalLM qwen4_exp Qwen4ExpForCausalLM
    qwen4_exp_text Qwen4ExpForCausalLM seed_oss SeedOssForCausalLM smollm3 SmolLM3ForCausalLM
    stablelm StableLmForCausalLM starcoder2 Starcoder2ForCausalLM step3_text Step3TextForCausalLM
    vaultgemma VaultGemmaForCausalLM zamba2 Zamba2ForCausalLM
    """
)
"""Type of a language model -> class that vLLM uses if the config names no class
(vllm/config/vllm.py::VllmConfig.with_hf_config@v0.32.0)."""
TEXT_BY_CONFIG: Final = word_set(
    """
    Blip2ForConditionalGeneration DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DeepseekVLV2ForCausalLM
    Eagle2_5_VLForConditionalGeneration GraniteSpeechForConditionalGeneration HCXVisionV2ForCausalLM
    InternS1ForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration
    LightOnOCRForConditionalGeneration LlavaNextForConditionalGeneration
    LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration
    Mistral3ForConditionalGeneration NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
    NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 OpenVLAForActionPrediction
    PixtralForConditionalGeneration SkyworkR1VChatModel Step3VLForConditionalGeneration
    Step3p7ForConditionalGeneration StepVLForConditionalGeneration VoxtralForConditionalGeneration
    """
)
"""Classes for which the config of their language model decides the class of that model."""
NO_PIPELINE: Final = word_set(
    """
    AriaForConditionalGeneration CohereAsrForConditionalGeneration DiffusionGemmaForBlockDiffusion
    FireRedASR2ForConditionalGeneration FunASRForConditionalGeneration Gemma3nForCausalLM
    Gemma3nForConditionalGeneration HrmTextForCausalLM IQuestLoopCoderForCausalLM
    Idefics3ForConditionalGeneration Mamba2ForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
    NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 NemotronParseForConditionalGeneration
    PaddleOCRVLForConditionalGeneration Phi4MMForCausalLM SmolVLMForConditionalGeneration
    WhisperForConditionalGeneration Zamba2ForCausalLM
    """
)
"""Classes without SupportsPP: with several stages, vLLM refuses their config
(vllm/config/model.py::ModelConfig.verify_with_parallel_config@v0.32.0)."""
GPU_CLASSES: Final = word_set(
    """
    DeepseekV41ForCausalLM DeepseekV4ForConditionalGeneration Dots3NoteForCausalLM HYV4ForCausalLM
    InklingForCausalLM InklingForConditionalGeneration KimiK3ForConditionalGeneration KimiLinearForCausalLM
    MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration Qwen4ExpForCausalLM
    Qwen4ExpForConditionalGeneration
    """
)
"""Classes that vLLM has only for GPUs of NVIDIA and AMD. On other devices, the class is missing or raises an
error (vllm/models@v0.32.0)."""
GPU_STATES: Final = word_set(
    """
    BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration
    FalconMambaForCausalLM JambaForCausalLM MambaForCausalLM OlmoHybridForCausalLM
    """
)
"""Classes whose layers with states have kernels for GPUs only: the scan of Mamba 1, which vLLM's libraries
for CPUs lack (vllm/.../mamba/mamba_mixer.py::selective_scan_fn@v0.32.0), or kernels in Triton."""
GATED_DELTA_NETS: Final = word_set(
    """
    InternS2MobiusForConditionalGeneration Qwen3NextForCausalLM Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    """
)
"""Classes whose linear attention is vLLM's QwenGatedDeltaNetAttention."""
