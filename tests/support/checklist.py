"""Which tests show each promise of the source guides: `pytest -k BM_07` runs those of BM-07.

BM BackendManager, CLI flags, ENV launch and environment, MSG messages, TAB tables, Q quantization, FT parallelism, CK
checkpoints, FS mps_fsdp_wrapper, TR tiny recursive models. An entry is a file and a test in it, with its parameters or
without.
"""

CHECKLIST = "promises/test_checklist.py::"
WRAPPER = "test_mps_fsdp_wrapper.py::"
OLDER, MANAGER = "test_older_scripts.py::", "test_backend_manager.py::"
SHOWN_BY = {
    "BM_01": [
        "test_older_imports.py::test_the_package_installed_as_it_is_needs_neither_torch_nor_mlx_to_be_imported",
        MANAGER + "test_constructing_one_imports_no_framework",
    ],
    "BM_02": [MANAGER + "test_names_and_values_are_the_documented_ones"],
    "BM_03": [MANAGER + "test_auto_and_none_choose_the_same"],
    "BM_04": [MANAGER + "test_auto_and_none_choose_the_same"],
    "BM_05": [
        MANAGER + "test_a_backend_is_given_as_text_or_enum",
        MANAGER + "test_an_unknown_word_names_the_valid_ones",
    ],
    "BM_06": [MANAGER + "test_the_summary_names_everything_and_quiet_prints_nothing"],
    "BM_07": [
        MANAGER + "test_auto_takes_the_first_available_in_the_documented_order",
        MANAGER + "test_mlx_that_has_only_a_processor_is_available_by_name_and_never_picked",
        "test_older_imports.py::test_an_imported_torch_is_asked",
    ],
    "BM_08": [MANAGER + "test_an_unavailable_backend_says_so_with_what_is_available"],
    "BM_09": [
        MANAGER + "test_the_baseline_has_every_documented_field_for_every_backend",
        "test_older_imports.py::test_a_manager_has_the_older_attributes",
    ],
    "BM_10": [
        MANAGER + "test_widths_are_supported_where_a_method_has_them_and_passes",
        MANAGER + "test_capabilities_are_probed_and_each_difference_carries_its_reason",
    ],
    "BM_11": [MANAGER + "test_a_batch_size_is_given_for_any_model_size"],
    "BM_12": [CHECKLIST + "test_the_guides_snippet_on_flash_attention_runs"],
    "BM_13": ["test_older_imports.py::test_a_subclass_may_return_a_list_and_nothing_else"],
    "BM_14": [MANAGER + "test_the_environment_names_a_backend", MANAGER + "test_junk_in_the_environment_is_an_error"],
    "BM_15": [MANAGER + "test_a_backend_is_added_in_a_few_lines"],
    "CLI_01": [
        CHECKLIST + "test_each_backend_word_parses_and_an_unavailable_one_ends_before_a_model_is_looked_for",
        OLDER + "test_an_older_command_line_that_is_refused_is_answered",
    ],
    "CLI_02": [
        "promises/test_hub_equals_local.py::test_a_hub_model_and_dataset_train_as_the_local_ones_do",
        "promises/test_exit_codes.py::test_bad_flags_are_one_line_that_names_the_flag",
    ],
    "CLI_03": [
        CHECKLIST + "test_a_qlora_run_prints_what_it_trains_and_leaves_its_base_as_it_was",
        "plan/test_resolve.py::test_older_product_names_map_or_say_what_is_missing",
        "test_train.py::test_the_base_folder_is_never_written_to",
    ],
    "CLI_04": [CHECKLIST + "test_the_effective_batch_is_printed_as_its_three_factors"],
    "CLI_05": [
        "plan/test_resolve.py::test_every_precision_word_settles",
        CHECKLIST + "test_the_parameters_have_the_dtype_that_the_precision_says",
    ],
    "CLI_06": ["test_train.py::test_an_epoch_takes_each_row_once_and_its_last_step_the_rows_that_remain"],
    "CLI_07": ["plan/test_parallelism.py::test_mlx_with_two_processes_gives_the_documented_text"],
    "CLI_08": [
        "test_cli.py::test_booleans_parse_bare_and_valued_with_dashes_and_underscores",
        "test_cli.py::test_checkpointing_is_bare_valued_or_auto",
    ],
    "CLI_09": [
        CHECKLIST + "test_loading_is_predicted_within_what_is_stored_and_two_layers",
        "quantizers/test_linear.py::test_a_matrix_quantized_some_rows_at_a_time_is_its_reference_bit_for_bit",
        "quantizers/test_linear.py::test_quantizing_a_matrix_takes_its_result_and_a_few_blocks",
    ],
    "CLI_10": ["plan/test_resolve.py::test_flash_attention_without_kernels_says_what_is_used_instead"],
    "CLI_11": [
        "test_quantization_wrapper.py::test_unsupported_pairs_are_reported_with_those_that_exist",
        "plan/test_resolve.py::test_a_quantizer_that_failed_its_probe_is_refused_with_the_ones_that_passed",
    ],
    "CLI_12": [
        CHECKLIST + "test_the_quantized_base_has_its_bits_and_little_more",
        "quantizers/test_linear.py::test_every_method_is_its_reference_its_dense_layer_its_file_and_trains",
    ],
    "CLI_13": [
        "test_cli.py::test_aliases_of_the_older_scripts_set_the_same_flag",
        OLDER + "test_an_older_flag_has_its_effect_in_the_plan[hqq_group_size 128 --train_type hqq_lora]",
    ],
    "CLI_14": ["test_train.py::test_accumulation_changes_nothing_in_the_curve"],
    "CLI_15": [
        "mlx_engine/test_step.py::test_settings_of_mlx_are_checked",
        "plan/test_mlx.py::test_settings_of_mlx_are_ignored_elsewhere_with_a_line",
    ],
    "CLI_16": [
        "torch_engine/test_profiling.py::test_traces_are_written",
        OLDER + "test_a_timeline_without_matplotlib_is_said_before_the_run_and_counted_truly",
    ],
    "CLI_17": ["promises/test_docs_are_true.py::test_no_comment_follows_a_continued_line"],
    "ENV_01": [
        CHECKLIST + "test_the_flag_beats_the_environment_beats_the_default",
        OLDER + "test_the_environment_variable_is_named",
    ],
    "ENV_02": [CHECKLIST + "test_two_visible_devices_are_two_ranks"],
    "ENV_03": [
        "distributed/test_env.py::test_every_launcher_gives_a_process_its_rank",
        "distributed/test_launcher.py::test_torchrun_starts_no_second_set_of_ranks",
    ],
    "ENV_04": [
        "distributed/test_env.py::test_every_launcher_gives_a_process_its_rank",
        "distributed/test_env.py::test_ranks_started_by_hand_meet_without_master_or_local_rank",
        "distributed/test_launcher.py::test_ranks_started_by_hand_all_answer_what_rank_0_answers",
    ],
    "ENV_05": [
        MANAGER + "test_watermarks_the_wrong_way_round_are_refused",
        CHECKLIST + "test_watermarks_are_left_alone_and_reported",
    ],
    "ENV_06": ["torch_engine/test_engine.py::test_threads_of_the_environment_are_respected"],
    "ENV_07": [
        "test_quantization_wrapper.py::test_a_missing_package_is_named_with_its_remedy",
        OLDER + "test_wandb_without_the_package_is_answered",
    ],
    "ENV_08": [CHECKLIST + "test_an_old_device_is_a_notice_and_no_error"],
    "MSG_01": [
        "plan/test_resolve.py::test_mps_without_bf16_gets_fp16_with_the_documented_text",
        "plan/test_resolve.py::test_mps_with_working_bf16_keeps_it",
    ],
    "MSG_02": [CHECKLIST + "test_four_bits_on_mps_are_one_notice"],
    "MSG_03": [CHECKLIST + "test_ranks_of_mps_meet_over_gloo"],
    "MSG_04": [
        "plan/test_parallelism.py::test_mlx_with_two_processes_gives_the_documented_text",
        CHECKLIST + "test_the_saved_plan_has_the_backend_type",
    ],
    "MSG_05": ["plan/test_resolve.py::test_cpu_warns_once_of_speed_and_once_of_quantization"],
    "MSG_06": [
        MANAGER + "test_memory_is_real_numbers",
        CHECKLIST + "test_memory_is_reported_in_gib_for_every_kind_of_backend",
    ],
    "MSG_07": ["torch_engine/test_engine.py::test_running_out_of_memory_names_what_to_lower"],
    "TAB_01": [CHECKLIST + "test_speeds_of_the_guides_are_not_repeated"],
    "TAB_02": [MANAGER + "test_the_baseline_has_every_documented_field_for_every_backend"],
    "TAB_03": [MANAGER + "test_the_baseline_has_every_documented_field_for_every_backend"],
    "TAB_04": ["plan/test_recommend.py::test_the_tree_ends_in_flags_that_parse"],
    "Q_01": ["test_older_imports.py::test_an_adapter_is_made_in_both_forms_and_quantizes"],
    "Q_02": [CHECKLIST + "test_hqq_4bit_is_hqq_with_four_bits"],
    "Q_03": ["test_quantization_wrapper.py::test_configs_say_what_a_method_has"],
    "Q_04": ["promises/test_parallel_equals_one_process.py::test_ranks_train_as_one_process_does[2]"],
    "Q_05": [CHECKLIST + "test_another_quantizer_starts_from_the_base_weights"],
    "FT_01": [CHECKLIST + "test_the_two_parallel_backends_parse_and_others_do_not"],
    "FT_02": [
        "promises/test_parallel_equals_one_process.py::test_degrees_of_the_command_line_give_the_run_of_one_process"
    ],
    "FT_03": [
        "distributed/test_parallel_dims.py::test_flags_and_older_words_mean_degrees",
        "promises/test_parallel_equals_one_process.py::test_ranks_train_as_one_process_does[2]",
    ],
    "FT_04": [
        "distributed/test_parallel_dims.py::test_flags_and_older_words_mean_degrees",
        "distributed/test_launcher.py::test_world_size_starts_its_own_ranks_and_only_the_first_speaks",
    ],
    "FT_05": ["promises/test_parallel_equals_one_process.py::test_ranks_train_as_one_process_does[2]"],
    "FT_06": ["promises/test_parallel_equals_one_process.py::test_ranks_train_as_one_process_does[2]"],
    "FT_07": [
        "promises/test_parallel_equals_one_process.py::test_ranks_train_as_one_process_does",
        "promises/test_parallel_equals_one_process.py::test_the_full_matrix",
    ],
    "FT_08": ["plan/test_parallelism.py::test_degrees_that_do_not_divide_are_refused_in_the_plan"],
    "FT_09": [
        CHECKLIST + "test_docs_start_torchrun_with_flags_that_it_has",
        "distributed/test_launcher.py::test_torchrun_starts_no_second_set_of_ranks",
    ],
    "FT_10": [CHECKLIST + "test_a_rank_takes_the_visible_device_of_its_local_rank"],
    "FT_11": [
        "distributed/test_accelerate_config.py::test_the_config_files_of_the_older_guide_are_there_and_mean_replicas",
        "distributed/test_launcher.py::test_accelerate_launch_starts_no_second_set_of_ranks",
    ],
    "FT_12": [
        "distributed/test_env.py::test_every_launcher_gives_a_process_its_rank",
        "distributed/test_hosts.py::test_two_hosts_train_as_one_process_does",
        "distributed/test_slurm.py::test_a_slurm_job_trains_as_one_process_does",
    ],
    "CK_01": ["torch_engine/test_older_state.py::test_a_plain_checkpoint_has_the_five_keys_and_loads_safely_ck_01"],
    "CK_02": ["torch_engine/test_older_state.py::test_a_plain_checkpoint_moves_between_backends_ck_02"],
    # FS: mps_fsdp_wrapper
    "FS_01": [WRAPPER + "test_without_mps_the_wrapper_says_so_and_the_check_never_raises"],
    "FS_02": [WRAPPER + "test_config_has_the_guides_fields_and_defaults"],
    "FS_03": [WRAPPER + "test_names_strings_and_torchs_own_enums_are_accepted_also_after_construction"],
    "FS_04": [WRAPPER + "test_names_strings_and_torchs_own_enums_are_accepted_also_after_construction"],
    "FS_05": [WRAPPER + "test_without_mps_the_wrapper_says_so_and_the_check_never_raises"],
    "FS_06": [WRAPPER + "test_another_backend_is_switched_to_gloo_with_a_warning"],
    "FS_07": [
        WRAPPER + "test_one_process_needs_no_launcher_and_logs_details_on_request_only",
        WRAPPER + "test_every_strategy_equals_one_process_with_averaged_gradients",
    ],
    "FS_08": [WRAPPER + "test_bfloat16_becomes_float16_where_the_device_has_none"],
    "FS_09": [WRAPPER + "test_units_by_size_by_class_and_by_a_function_of_fsdp1s_form"],
    "FS_10": [WRAPPER + "test_a_checkpoint_resumes_bitwise_and_on_another_number_of_ranks"],
    "FS_11": [WRAPPER + "test_a_checkpoint_resumes_bitwise_and_on_another_number_of_ranks"],
    "FS_12": [WRAPPER + "test_one_process_needs_no_launcher_and_logs_details_on_request_only"],
    "FS_13": [WRAPPER + "test_one_process_needs_no_launcher_and_logs_details_on_request_only"],
    "FS_14": [WRAPPER + "test_a_larger_model_is_never_sharded_less_and_the_pool_is_obeyed"],
    "FS_15": [WRAPPER + "test_a_larger_model_is_never_sharded_less_and_the_pool_is_obeyed"],
    "FS_16": [WRAPPER + "test_helpers_pass_fields_to_the_config"],
    "FS_17": ["test_mps_fsdp_guide.py::test_every_block_runs_in_one_process"],
    "FS_18": [WRAPPER + "test_without_mps_the_wrapper_says_so_and_the_check_never_raises"],
    "FS_19": [WRAPPER + "test_the_fallback_switch_is_set_for_children_and_restored"],
    "FS_20": ["test_mps_fsdp_guide.py::test_every_block_runs_in_one_process"],
    "FS_21": [
        "estimate/test_memory.py::test_a_ranks_own_bytes_are_predicted_to_the_byte",
        "torch_engine/parallel/test_device_without_collectives.py::test_bytes_of_a_step_are_those_of_a_device_that_resizes",
    ],
    "FS_22": ["promises/test_checklist.py::test_speeds_of_the_guides_are_not_repeated"],
    "FS_23": [WRAPPER + "test_without_mps_the_wrapper_says_so_and_the_check_never_raises"],
    "FS_24": [WRAPPER + "test_one_process_needs_no_launcher_and_logs_details_on_request_only"],
    "CK_03": [
        "mlx_engine/test_runs.py::test_folders_of_mlx_train_and_say_what_they_are",
        "mlx_engine/test_step.py::test_a_folder_that_mlx_lm_wrote_trains_as_it_is_stored",
    ],
    "CK_04": [
        "mlx_engine/test_runs.py::test_the_adapter_gives_peft_the_logits_it_gives_mlx",
        "mlx_engine/test_runs.py::test_a_run_that_moves_twice_is_the_run_that_stays",
        "promises/test_docs_are_true.py::test_every_command_parses_and_its_plan_settles",
    ],
    "TR_01": [
        "test_pretrain.py::test_a_run_trains_saves_and_publishes",
        "torch_engine/recursive/test_weights.py::test_every_flag_of_generation_is_accepted_and_a_missing_checkpoint_is_one_line",
    ],
    "TR_02": [
        "test_pretrain.py::test_bad_input_is_one_line_and_exit_code_2",
        "test_pretrain.py::test_a_refusal_ends_the_process_with_code_2",
        "promises/test_recursive_guide.py::test_every_training_command_reads_as_a_recipe",
    ],
    "TR_03": [
        "test_pretrain.py::test_a_run_trains_saves_and_publishes",
        "test_recipe.py::test_each_key_changes_the_settings_and_is_saved",
        "test_recipe.py::test_the_defaults_of_cfg_chat_are_the_documented_ones",
    ],
    "TR_04": ["test_pretrain.py::test_rows_are_cut_to_seq_len_and_a_longer_one_is_accepted"],
    "TR_05": ["test_pretrain.py::test_heads_that_do_not_divide_the_hidden_size_are_fewer_with_a_reason"],
    "TR_06": ["test_pretrain.py::test_bfloat16_is_used_where_the_machine_computes_in_it"],
    "TR_07": ["test_pretrain.py::test_compilation_is_never_used_on_mps_or_if_disabled"],
    "TR_08": ["test_pretrain.py::test_several_ranks_are_refused_on_mps_before_anything_is_read"],
    "TR_09": [
        "promises/test_recursive_guide.py::test_the_guides_example_trains_and_answers",
        "torch_engine/recursive/test_weights.py::test_every_flag_of_generation_is_accepted_and_a_missing_checkpoint_is_one_line",
    ],
    "TR_10": [
        "data/pretraining/test_chat_tokens.py::test_every_format_is_built_and_read_back",
        "data/pretraining/test_chat_tokens.py::test_a_long_row_loses_its_front_or_the_tail_of_its_answer",
        "data/pretraining/test_chat_tokens.py::test_a_hub_tokenizer_that_is_not_reachable_is_replaced_with_a_reason",
    ],
    "TR_11": ["promises/test_recursive_guide.py::test_the_guides_example_script_works_offline"],
    "TR_12": [
        "test_pretrain.py::test_a_run_trains_saves_and_publishes",
        "torch_engine/recursive/test_weights.py::test_a_step_holds_raw_and_averaged_weights_and_the_run_the_averaged",
    ],
    "TR_13": ["test_pretrain.py::test_no_memory_ends_with_a_code_and_advice"],
    "TR_14": [
        "test_pretrain.py::test_no_memory_ends_with_a_code_and_advice",
        "test_pretrain.py::test_bad_input_is_one_line_and_exit_code_2",
    ],
    "TR_15": ["test_pretrain.py::test_no_worker_process_and_no_pinned_memory_is_used"],
    "TR_16": [
        "test_pretrain.py::test_the_true_number_of_parameters_is_printed",
        "torch_engine/recursive/test_model.py::test_the_parameters_are_those_that_the_plan_counts",
    ],
    "TR_17": ["test_backend_manager.py::test_an_unavailable_backend_says_so_with_what_is_available"],
}


def ids_of(nodeid: str) -> set[str]:
    """Ids of the promises that a test shows."""
    wanted = {nodeid.removeprefix("tests/"), nodeid.removeprefix("tests/").partition("[")[0]}
    return {name for name, tests in SHOWN_BY.items() if wanted & set(tests)}
