package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strconv"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// askTime is what the broker allows a program.
const askTime = 30 * time.Second

// ask runs the handler's program for a volume, as the broker does.
func (v *testVolume) ask(ctx context.Context, words ...string) (programResult, error) {
	program, err := v.line(abi.CLIName)
	if err != nil {
		return programResult{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append([]string{abi.Word}, words...)...) //nolint:gosec // the program that is tested
	cmd.Dir, cmd.Env = "/", []string{"LC_ALL=C", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	return runProgram(ctx, v.n.dir, cmd)
}

// wantExit fails unless the program ends with a status.
func (v *testVolume) wantExit(ctx context.Context, status int, words ...string) error {
	ended, err := v.ask(ctx, words...)
	if err != nil {
		return err
	}
	return wantStatus(ended, status, words)
}

func wantStatus(ended programResult, status int, words []string) error {
	switch {
	case ended.code == status && (status == abi.ExitOK || ended.stderr != ""):
		return nil
	case ended.code == status:
		return fmt.Errorf("%v ended with status %d, as it should, and says nothing on standard error", words, ended.code)
	case ended.code == abi.ExitUnsupported && status != abi.ExitUsage:
		return unsupported{reason: lastLine(ended.stderr)}
	default:
		return fmt.Errorf("%v ended with status %d and should with %d: %q", words, ended.code, status, lastLine(ended.stderr))
	}
}

// answer runs the program and parses its output.
func answer[T any](ctx context.Context, v *testVolume, words ...string) (reply T, err error) {
	ended, err := v.ask(ctx, words...)
	if err != nil {
		return reply, err
	}
	if err := wantStatus(ended, abi.ExitOK, words); err != nil {
		return reply, err
	}
	if err := json.Unmarshal([]byte(ended.stdout), &reply); err != nil {
		return reply, fmt.Errorf("%v printed %q: %w", words, ended.stdout, err)
	}
	return reply, nil
}

func (v *testVolume) stats(ctx context.Context) (abi.StatsReply, error) {
	return answer[abi.StatsReply](ctx, v, abi.Stats, v.target)
}

func (v *testVolume) resize(ctx context.Context, least, most int64) (int64, error) {
	reply, err := answer[abi.ResizeReply](ctx, v, abi.Resize, v.target, strconv.FormatInt(least, 10), strconv.FormatInt(most, 10))
	return reply.CapacityBytes, err
}
