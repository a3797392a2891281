// Package conformance tests a runtime handler that has runc's command line against docs/runtime-authors.md: on a
// device, a guard and a volume of its own, without a container runtime and without the broker.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Options say what is tested, and how.
type Options struct {
	// Runtime is the handler's program.
	Runtime string
	// Root holds the directories of volumes, where the handler looks for them.
	Root string
	// FSType is the filesystem of the volumes: ext4, xfs or btrfs.
	FSType string
	// Dir is where the simulated node gets its directory.
	Dir string
	// Only are the names of the test cases to run; none is all.
	Only []string
}

// Check refuses invalid options.
func (o Options) Check() error {
	if o.Runtime == "" {
		return errors.New("--runtime is missing: the program to try")
	}
	if makers := mkfsArguments("", 0); makers[o.FSType] == nil {
		return fmt.Errorf("--fs %q is none of %v", o.FSType, slices.Sorted(maps.Keys(makers)))
	}
	for _, name := range o.Only {
		if !slices.Contains(CaseNames(), name) {
			return fmt.Errorf("--only %q is none of %v", name, CaseNames())
		}
	}
	return nil
}

// Run runs the test cases and reports each requirement as soon as its result is known.
// An error is one of this program or of the node, and says nothing of the handler.
func Run(ctx context.Context, opts Options, onResult func(Result)) (Report, error) {
	node, err := newNode(opts)
	if err != nil {
		return Report{}, err
	}
	s := &suite{node: node, onResult: onResult, outcomes: make(map[string]Result)}
	s.report.Run = node.run
	err = s.runAll(ctx, opts.Only)
	return s.report, errors.Join(err, node.close())
}

// cleanupTimeout bounds the removal of what one test case made.
const cleanupTimeout = time.Minute

func (s *suite) runAll(ctx context.Context, only []string) error {
	for _, c := range testCases() {
		if len(only) > 0 && !slices.Contains(only, c.name) {
			continue
		}
		if err := s.runCase(ctx, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

func (s *suite) runCase(ctx context.Context, c testCase) error {
	err := try(ctx, func(t *trial) { c.run(t, s) })
	// "At no time" holds for every test case, not only for the one that checks it.
	if seen := s.node.mounts.CheckNone(); seen != nil && s.outcomes["mount-host"].Status != Fail {
		s.record("mount-host", Fail, fmt.Sprintf("during %q: %v", c.name, seen))
	}
	// An interrupt does not stop the cleanup.
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	return errors.Join(err, s.node.scratch.run(ending))
}

// testCase checks some requirements, on a device of its own.
type testCase struct {
	name string
	run  func(*trial, *suite)
}

func testCases() []testCase {
	return []testCase{
		{"plain", runPlain},
		{"volume", runVolume},
		{"keys", runKeys},
		{"many", runMany},
		{"sub", runSub},
		{"readonly", runReadOnly},
		{"users", runUsers},
		{"group", runGroup},
		{"refuse", runRefuse},
		{"resize", runResize},
		{"freeze", runFreeze},
		{"life", runLife},
	}
}

// CaseNames lists the test cases in their order.
func CaseNames() []string {
	var names []string
	for _, c := range testCases() {
		names = append(names, c.name)
	}
	return names
}

// requirement is a demand of docs/runtime-authors.md in one line, and its section.
type requirement struct{ section, text string }

// RequirementNames lists the names of all requirements.
func RequirementNames() []string { return slices.Sorted(maps.Keys(requirements())) }

func requirements() map[string]requirement {
	return map[string]requirement{
		"plain-container":    {"10", "a container without deferred volumes starts as if there were none"},
		"mount-inside":       {"7", "the container sees the volume's filesystem in the guard's place, and can write to it"},
		"mount-host":         {"7", "the filesystem is never in the host's mountinfo, and the host still sees the guard"},
		"mount-grown":        {"7", "a filesystem that is smaller than its device is grown before a container sees it"},
		"mount-shared":       {"7", "all containers of a pod share one mount of the filesystem"},
		"mount-extra":        {"5", "unknown keys of mountInfo.json are ignored"},
		"mount-bare":         {"5", "a mountInfo.json without the crust. keys is enough to mount"},
		"mount-options":      {"5", "mount options have their effect"},
		"mount-two":          {"7", "a container with two volumes, one of them twice, has each at its destination"},
		"mount-at-once":      {"7", "containers of a pod that are created concurrently share one mount of the filesystem"},
		"mount-killed":       {"7", "after the handler was killed while creating a container, the next attempt succeeds"},
		"binding-files":      {"11", "after the mount there are runtime-cli and a file named by the sandbox id, and nothing unknown"},
		"binding-program":    {"15", "runtime-cli names a program that the broker can run: owned by root, writable by root alone, reached without links"},
		"binding-info":       {"4", "the handler does not change mountInfo.json"},
		"life-container":     {"7", "the mount survives each of the pod's containers"},
		"life-free":          {"7", "when sandbox and containers have ended, even by a kill, the device becomes free by itself"},
		"life-answer":        {"12", "the program answers with status 3 for a volume whose sandbox has ended"},
		"life-again":         {"1", "a new sandbox of the same pod mounts the volume again"},
		"life-newest":        {"11", "the new sandbox is asked, even if the dead one's file still exists"},
		"sub-bound":          {"6", "a sub-directory that kubelet bound through a descriptor is found by mountinfo, and only it is shown"},
		"sub-names":          {"6", "escapes in the names of sub-directories in mountinfo are decoded"},
		"sub-path":           {"6", "a source that leads into the guard by its path alone shows the sub-directory"},
		"sub-made":           {"9", "a missing sub-directory is made, owned by root, with the mode of the volume's root directory"},
		"sub-link":           {"9", "a link that leads out of the volume is refused"},
		"sub-race":           {"15", "a directory that the workload swaps for a link at that time is shown as it was, or refused"},
		"sub-file":           {"9", "a sub-directory that is a file in the volume is refused"},
		"sub-deleted":        {"6", "a sub-directory that was removed from the guard is refused"},
		"ro-mount":           {"9", "a container with a read-only mount cannot write to it, and others still can"},
		"ro-recursive":       {"9", "a container with a recursively read-only mount (rro) cannot write to it"},
		"ro-volume":          {"9", "a read-only volume can be read and not written"},
		"ro-group":           {"8", "the group is not applied to a read-only volume"},
		"ro-sub":             {"9", "a missing sub-directory of a read-only volume is refused"},
		"users-mapped":       {"9", "the ID mappings of a mount have their effect, or the container is refused"},
		"group-always":       {"8", "Always: every file has the group, its owner, and 0660 added to its mode (directories 02770)"},
		"group-setid":        {"8", "setuid and setgid, which a change of the group clears, are restored"},
		"group-link":         {"8", "a symbolic link gets the group and is not followed"},
		"group-fixed":        {"8", "a file that cannot be changed is left as it is, and is no error"},
		"group-match":        {"8", "OnRootMismatch: nothing is changed if the root directory is right"},
		"group-mismatch":     {"8", "OnRootMismatch: every file is changed if the root directory is not right"},
		"refuse-pod":         {"10", "a volume of another pod is refused"},
		"refuse-unpublished": {"10", "a guard whose volume has no directory is refused"},
		"refuse-alone":       {"10", "a volume is refused to a container without a sandbox, and to the sandbox itself"},
		"refuse-sandbox":     {"10", "a sandbox that is another pod's, is a container, or is named for two container runtimes, is refused"},
		"refuse-device":      {"10", "a device that is not crust.device is refused"},
		"refuse-target":      {"5", "a mountInfo.json of another target path is refused"},
		"refuse-type":        {"18", "an unknown volume-type is refused"},
		"refuse-broken":      {"5", "a mountInfo.json that cannot be read is refused"},
		"refuse-option":      {"10", "an option that is unknown to the filesystem, or invalid, is refused"},
		"refuse-second":      {"10", "a device that another sandbox has mounted is refused"},
		"refuse-clean":       {"10", "a refusal leaves nothing mounted and no binding"},
		"refuse-others":      {"10", "containers without the volume start, whatever is wrong with it"},
		"stats-true":         {"12", "stats equal statfs in the sandbox, and the condition is not abnormal"},
		"stats-sane":         {"12", "no number is negative, and neither used nor available is more than total"},
		"cli-unknown":        {"12", "the program answers with status 3 for a volume that no sandbox has"},
		"cli-arguments":      {"12", "the program answers with status 2 to invalid arguments"},
		"socket-same":        {"13", "the socket gives the same answers as the program, and names the sandbox"},
		"socket-codes":       {"13", "the socket refuses with the codes of the table"},
		"resize-online":      {"12", "the mounted filesystem grows to the size of its device during writes, and keeps its data"},
		"resize-again":       {"12", "resize of a filesystem that fills its device already succeeds"},
		"resize-far":         {"12", "a size beyond the device is refused with status 5"},
		"resize-limit":       {"12", "a device that is larger than the maximum is refused with status 5"},
		"freeze-holds":       {"14", "a write waits while the volume is frozen"},
		"freeze-stats":       {"14", "stats are answered while the volume is frozen"},
		"freeze-twice":       {"14", "freeze of a frozen volume is refused, and leaves it frozen"},
		"freeze-thaw":        {"14", "thaw lets the writes go on"},
		"freeze-auto":        {"14", "when the time is over, writes go on without any call"},
		"thaw-idle":          {"14", "thaw of a volume that is not frozen is refused"},
		"thaw-late":          {"14", "thaw is refused if the time was already over, so that the caller learns of it"},
		"thaw-dead":          {"14", "thaw of a dead sandbox's volume succeeds, or says that the freeze ended with it (status 6); the device is free"},
	}
}

// Status is the outcome of a requirement.
type Status string

// The statuses.
const (
	Pass Status = "PASS"
	Fail Status = "FAIL"
	// Skip: the handler says that it cannot do an optional part, or the requirement
	// could not be tested because another one failed.
	Skip Status = "SKIP"
)

// Result is the outcome of one requirement.
type Result struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Section is the section of docs/runtime-authors.md that has the requirement, if it is of a runtime handler. Demand
	// is its text.
	Section string `json:"section"`
	Demand  string `json:"demand"`
	// Seen is what was seen, unless it passed.
	Seen string `json:"seen,omitempty"`
}

// Report has the results of a run.
type Report struct {
	// Run is in the names of all containers that were made.
	Run     string   `json:"run"`
	Results []Result `json:"results"`
}

// Count counts the results with a status.
func (r Report) Count(status Status) int {
	n := 0
	for _, result := range r.Results {
		if result.Status == status {
			n++
		}
	}
	return n
}

type suite struct {
	node     *node
	onResult func(Result)
	outcomes map[string]Result // by requirement
	report   Report
}

// unsupported is the handler's answer that it cannot do an optional thing.
type unsupported struct{ reason string }

func (u unsupported) Error() string { return u.reason }

// check tests one requirement, unless one that it needs has not passed. A requirement of
// a test case that was not run counts as met.
func (s *suite) check(t *trial, name string, test func(*trial), needs ...string) {
	if t.ctx.Err() != nil {
		return // what it needs may have been cut off
	}
	for _, need := range needs {
		is, tested := s.outcomes[need]
		switch {
		case !tested || is.Status == Pass:
			continue
		case is.Status == Skip: // for the same reason
			s.record(name, Skip, is.Seen)
		default:
			s.record(name, Skip, "not tried, because "+need+" did not pass")
		}
		return
	}
	err := try(t.ctx, test)
	if t.ctx.Err() != nil {
		return // an interrupt is no fault of the handler
	}
	switch cannot, is := errors.AsType[unsupported](err); {
	case err == nil:
		s.record(name, Pass, "")
	case is:
		s.record(name, Skip, "the handler says that it cannot: "+cannot.reason)
	default:
		s.record(name, Fail, err.Error())
	}
}

func (s *suite) record(name string, status Status, seen string) {
	r := requirements()[name]
	result := Result{Name: name, Status: status, Section: r.section, Demand: r.text, Seen: seen}
	s.outcomes[name] = result
	s.report.Results = append(s.report.Results, result)
	s.onResult(result)
}

func want[T comparable](what string, got, wanted T) error {
	if got == wanted {
		return nil
	}
	return fmt.Errorf("%s is %v and should be %v", what, got, wanted)
}
