// Package conformance tests a runtime handler that has runc's command line against
// docs/runtime-authors.md: on a device, a guard and a volume of its own, without a
// container runtime and without the broker.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// Options say what is tested, and how.
type Options struct {
	// Runtime is the handler's program; Args are added before its command.
	Runtime string
	Args    []string
	// Root holds the directories of volumes, where the handler looks for them.
	Root string
	// FSType is the filesystem of the volumes: ext4, xfs or btrfs.
	FSType string
	// Self is the program that runs Probe in the containers. It is static.
	Self string
	// Dir is where the simulated node gets its directory.
	Dir string
	// Only are the names of the test cases to run; none is all.
	Only []string
}

// Default has the usual directories of a node.
func Default() Options {
	return Options{Root: abi.DefaultRoot, FSType: "ext4", Self: "/proc/self/exe", Dir: "/var/tmp"}
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
	s := &suite{node: node, onResult: onResult, statuses: make(map[string]Status)}
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
	err := try(ctx, func(t *trial) { defer s.sawNoMount(c.name); c.run(t, s) })
	// An interrupt does not stop the cleanup.
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	return errors.Join(err, s.node.scratch.run(ending))
}

// sawNoMount holds "at no time" against every test case, not only the one that checks it.
func (s *suite) sawNoMount(during string) {
	if err := s.node.mounts.CheckNone(); err != nil && s.statuses["mount-host"] != Fail {
		s.record("mount-host", Fail, fmt.Sprintf("during %q: %v", during, err))
	}
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
