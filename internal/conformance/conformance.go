// Package conformance tries a runtime handler that has runc's command line against
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

// Options say what is tried, and how.
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
	// Dir is where the node that is played gets its directory.
	Dir string
	// Only are the names of the scenes to play; none is all.
	Only []string
}

// Default is a node's own places.
func Default() Options {
	return Options{Root: abi.DefaultRoot, FSType: "ext4", Self: "/proc/self/exe", Dir: "/var/tmp"}
}

// Check refuses options that cannot be meant.
func (o Options) Check() error {
	if o.Runtime == "" {
		return errors.New("--runtime is missing: the program to try")
	}
	if makers := mkfsArguments("", 0); makers[o.FSType] == nil {
		return fmt.Errorf("--fs %q is none of %v", o.FSType, slices.Sorted(maps.Keys(makers)))
	}
	for _, name := range o.Only {
		if !slices.Contains(SceneNames(), name) {
			return fmt.Errorf("--only %q is none of %v", name, SceneNames())
		}
	}
	return nil
}

// Run tries everything and tells of each demand as soon as it is known. An error is
// one of this program or of the node: then nothing is said of the handler.
func Run(ctx context.Context, opts Options, tell func(Result)) (Report, error) {
	s := &suite{opts: opts, tell: tell, known: make(map[string]Status)}
	node, err := newNode(opts)
	if err != nil {
		return Report{}, err
	}
	s.node, s.report.Run = node, node.run
	err = s.play(ctx)
	return s.report, errors.Join(err, node.close())
}

// endTime bounds the clearing away of what one scene has made.
const endTime = time.Minute

func (s *suite) play(ctx context.Context) error {
	for _, scene := range scenes() {
		if !s.wanted(scene.name) {
			continue
		}
		if err := s.playOne(ctx, scene); err != nil {
			return fmt.Errorf("%s: %w", scene.name, err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

func (s *suite) playOne(ctx context.Context, scene scene) error {
	err := scene.play(s, ctx)
	// What was begun is ended also when the operator has enough.
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
	defer cancel()
	return errors.Join(err, s.node.undo(ending))
}

// scene is a part of the story that stands on a device of its own.
type scene struct {
	name string
	play func(*suite, context.Context) error
}

func scenes() []scene {
	return []scene{
		{"plain", (*suite).plain},
		{"volume", (*suite).volume},
		{"many", (*suite).many},
		{"sub", (*suite).sub},
		{"readonly", (*suite).readOnly},
		{"group", (*suite).group},
		{"refuse", (*suite).refuse},
		{"resize", (*suite).resize},
		{"freeze", (*suite).freeze},
		{"life", (*suite).life},
	}
}

// SceneNames lists the scenes in their order.
func SceneNames() []string {
	var names []string
	for _, scene := range scenes() {
		names = append(names, scene.name)
	}
	return names
}
