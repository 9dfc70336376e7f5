"""Every row of the mission (docs/mission.md) and the test that proves it."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from tuner.cli import app

TESTS = Path(__file__).parent
ROWS: dict[str, str] = {
    "M1": "tuning/test_inherited.py::test_M1_what_is_launched_and_published_is_whole",
    "M2": "engine/test_real_preemption.py"
    "::test_M2_recompute_pays_for_every_preemption_with_tokens_computed_again",
    "M3": "replay/test_timeline.py::test_a_window_is_measured_by_scheduled_arrival_between_warm_up_and_tail",
    "M4": "traffic/test_capture.py::test_no_word_reaches_the_disk",
    "M5": "replay/test_timeline.py::test_bodies_carry_exact_lengths_and_never_share_tokens_with_the_warm_up",
    "M6": "search/test_pareto.py::test_front_holds_what_nothing_beats",
    "M7": "fleet/test_ray.py::test_each_class_has_a_winner_of_its_own",
    "M8": "fleet/test_ray.py::test_M8_live_limits_screen_in_an_engine_that_stays_on_a_node",
    "M9": "replay/test_timeline.py::test_M9_five_hundred_sessions_are_served_at_once_and_none_is_lost",
    "M10": "test_mission.py::test_M10_the_confirmed_winner_of_a_real_card_cuts_latency_by_forty_percent",
    "M11": "search/test_ladder.py::test_M11_it_doubles_until_the_tail_worsens_and_then_bisects",
    "M12": "tuning/test_seeds.py::test_M12_the_concurrency_of_the_trace_seeds_the_search",
    "M13": "simulator/test_journey.py::test_M13_the_journey_climbs_from_one_by_one_to_continuous_batching",
    "M14": "commands/test_small_faults.py"
    "::test_m14_a_new_study_has_a_ttft_of_500_ms_and_one_without_keeps_its_meaning",
    "M15": "engine/test_live_limits.py::test_M15_the_scheduler_counts_what_its_steps_hold",
    "M16": "knobs/test_space.py"
    "::test_M16_M18_kernels_graphs_pages_and_layouts_are_turned_by_shipped_spaces_and_read_back",
    "M17": "simulator/test_core.py::test_running_before_waiting_under_one_budget",
    "M18": "engine/test_engine_words.py"
    "::test_M18_the_attention_backend_that_the_engine_chose_is_read_from_its_log",
    "M19": "tuning/test_classes.py::test_M19_priority_scheduling_wins_a_night_of_mixed_classes",
    "M20": "tuning/test_quality.py::test_M20_what_was_not_judged_is_told_and_is_no_finalist",
    "M21": "knobs/test_space.py::test_M21_the_presets_hold_what_their_guides_found_best",
    "M22": "tuning/test_gpus_held.py::test_M22_an_engine_holds_the_product_of_its_layout",
    "M23": "service/test_pages.py"
    "::test_M23_what_the_winner_saves_is_in_the_conclusion_on_the_page_and_on_the_command_line",
    "M24": "commands/test_small_faults.py::test_m24_knobs_that_this_trace_cannot_judge_are_said_aloud",
    "M25": "traffic/test_beam.py::test_a_beam_search_is_imported_as_one",
    "M26": "fleet/test_schedule_night.py::test_a_night_fires_and_ends_inside_its_window_with_production_back",
    "M27": "service/test_pages.py::test_M27_the_history_can_be_asked_by_workload_and_shows_it",
    "M28": "service/test_stories.py::test_pipeline_pulls_and_follows_promotion_and_rollback",
    "M29": "profiles/test_charts.py::test_values_hold_to_the_schema_and_name_only_its_keys",
    "M30": "profiles/test_registry.py"
    "::test_M20_what_was_not_judged_is_promoted_only_where_the_study_said_so_and_says_it",
    "M31": "tuning/test_end_to_end.py::test_finalists_and_baseline_were_measured_again",
    "M32": "engine/test_cases_verdicts.py::test_each_known_error_gets_its_verdict_first_cause_first",
    "M33": "engine/test_cases_processes.py::test_case_01_children_of_a_killed_server_are_swept",
    "M34": "search/test_pareto.py::test_front_leaves_out_screened_partial_and_unfinished",
    "M35": "tuning/test_end_to_end.py::test_finalists_and_baseline_were_measured_again",
    "M36": "tuning/test_early_stopping.py::test_what_cannot_matter_is_stopped_early",
    "M37": "tuning/test_seeds.py::test_M37_a_second_night_begins_with_the_winner_and_the_front_of_the_first",
    "M38": "engine/test_live_limits.py::test_the_real_engine_schedules_by_its_new_limits",
    "M39": "simulator/test_predict.py::test_one_trial_calibrates_for_the_others",
    "M40": "engine/test_engine_words.py::test_M40_an_offload_that_the_engine_did_not_take_is_a_difference",
    "M41": "replay/test_turns.py::test_a_turn_waits_for_its_parent_and_the_users_thought",
    "M42": "service/test_auth.py::test_every_route_asks_for_the_scope_that_is_documented",
    "M43": "browser/test_stories.py::test_a_live_run_moves_without_a_reload",
    "M44": "history/test_postgres.py::test_what_a_release_wrote_is_taken_over",
    "M45": "replay/test_measure.py::test_bisection_brackets_the_highest_speed",
    "M46": "tuning/test_end_to_end.py::test_the_winner_is_pulled_and_nothing_changes_the_second_time",
}


def names_in(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", [f"M{number}" for number in range(1, 47)])
def test_every_row_of_the_mission_has_a_test_that_proves_it(row: str) -> None:
    path, _, name = ROWS[row].partition("::")
    assert name in names_in(TESTS / path)
    page = (TESTS.parent / "docs" / "mission.md").read_text()
    assert f"| {row} |" in page


PAGE = (TESTS.parent / "docs" / "mission.md").read_text()


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`tuner ([^`]+)`", PAGE))))
def test_every_command_of_the_page_is_one(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = line.split()
    while getattr(command, "commands", None):
        assert words[0] in command.commands
        command = command.commands[words.pop(0)]
    options = {name for each in command.params for name in each.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_M10_the_confirmed_winner_of_a_real_card_cuts_latency_by_forty_percent() -> None:
    """From the raw files of the sixth run: each launch of the confirmation ran in a process of its own."""
    results = TESTS.parent / "docs" / "results"
    raw = results / "h100"
    launches: dict[int, list[dict[str, float]]] = {}
    for number in (0, 1):
        trial = json.loads((raw / f"sixth-a-trial-{number}.json").read_text())
        assert trial["state"] == "COMPLETE"
        launches[number] = [one["values"] for one in trial["measurements"] if one["purpose"] == "confirm"]
    assert [len(each) for each in launches.values()] == [2, 2]
    before, after = ([one["e2e_p95_ms"] for one in launches[number]] for number in (0, 1))
    assert max(after) < 0.6 * min(before), "the worst launch of the winner against the baseline's best"
    assert all(one["slo_attainment"] == 1 and one["failed"] == 0 for one in launches[1])
    change = (sum(after) - sum(before)) / sum(before)
    told = f"e2e_p95_ms −{-change:.0%}".replace("%", " %")
    assert told in (raw / "sixth-tune-a.log").read_text()
    assert f"p95 E2E −{-change:.0%}".replace("%", " %") in (results / "h100.md").read_text()
