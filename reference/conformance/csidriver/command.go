// Package csidriver tests a CSI driver, on volumes of its own, which are removed in the end: the
// SnapshotMetadata service, for which csi-sanity has no specs, and what docs/driver-authors.md requires of a driver
// that defers by itself. It needs the driver's mount namespace.
package csidriver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/reference/conformance"
)

// Options say how volumes are made.
type Options struct {
	// Size is that of the volumes, in bytes.
	Size int64
	// FSType is the filesystem of volumes that are not raw block.
	FSType string
	// Parameters are those of CreateVolume.
	Parameters map[string]string
	// Dir is where the volumes are published, in a directory of the run's own.
	Dir string
}

const (
	// setupTimeout bounds the making of volumes and snapshots.
	setupTimeout = 15 * time.Minute
	// cleanupTimeout bounds the removal of what a run has made.
	cleanupTimeout = 2 * time.Minute
)

// spec is a requirement. F is what all requirements of a suite look at.
type spec[F any] struct {
	name, demand string
	try          func(context.Context, F) error
}

// run tries each requirement and reports its result at once. An error says that volumes or
// snapshots could not be made or removed, and nothing of the requirements.
func run[F any](ctx context.Context, conn grpc.ClientConnInterface, opts Options, specs []spec[F],
	fixture func(context.Context, *driver) (F, error), onResult func(conformance.Result),
) (conformance.Report, error) {
	setup, done := context.WithTimeout(ctx, setupTimeout)
	defer done()
	d, err := newDriver(setup, conn, opts)
	if err != nil {
		return conformance.Report{}, err
	}
	report := conformance.Report{Run: d.run}
	f, err := fixture(setup, d)
	for _, s := range specs {
		if err = errors.Join(err, ctx.Err()); err != nil {
			break // also when it is interrupted: each spec would fail
		}
		result := s.result(ctx, f)
		report.Results = append(report.Results, result)
		onResult(result)
	}
	ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	for _, undo := range slices.Backward(d.undo) {
		err = errors.Join(err, undo(ending))
	}
	return report, errors.Join(err, os.RemoveAll(filepath.Join(d.dir, "staging")), os.Remove(d.dir))
}

// errSkipped is the answer of a spec that does not apply.
var (
	errSkipped     = errors.New("not tried")
	errNotReported = fmt.Errorf("%w: the driver does not report what this needs", errSkipped)
)

func (s spec[F]) result(ctx context.Context, f F) conformance.Result {
	ctx, cancel := context.WithTimeout(ctx, specTimeout)
	defer cancel()
	result := conformance.Result{Name: s.name, Status: conformance.Pass, Demand: s.demand}
	if err := s.try(ctx, f); err != nil {
		result.Status, result.Seen = conformance.Fail, err.Error()
		if errors.Is(err, errSkipped) {
			result.Status = conformance.Skip
		}
	}
	return result
}

// specTimeout is what the calls of one requirement may take.
const specTimeout = time.Minute

// suite is a word of crust-conformance.
type suite struct {
	about string
	run   func(context.Context, grpc.ClientConnInterface, Options, func(conformance.Result)) (conformance.Report, error)
}

func suites() map[string]suite {
	return map[string]suite{
		"snapshot-metadata": {"Test the SnapshotMetadata service of a CSI driver. Volumes are used as raw block.", RunMetadata},
		"driver":            {"Test a CSI driver that reports DEFER_FS_OPS against docs/driver-authors.md.", RunDeferral},
	}
}

// Has reports whether a word of crust-conformance is one of these suites.
func Has(word string) bool { _, has := suites()[word]; return has }

const help = `%[2]s
Volumes are made and removed by the driver's own calls. Run it as root in the
mount namespace of the driver.

Usage:
  crust-conformance %[1]s --csi-endpoint SOCKET [flags]

Exit codes: 0 all demands are met, 1 one is not or the run failed, 2 wrong usage.

Flags:
`

// Main runs a suite and gives its exit code.
func Main(word string, args []string, stdout, stderr io.Writer) int {
	ctx, stop := sys.UntilInterrupted()
	defer stop()
	signal.Ignore(syscall.SIGPIPE) // it cleans up also if nobody reads on
	var opts Options
	flags := pflag.NewFlagSet(word, pflag.ContinueOnError)
	flags.Usage = func() {}
	endpoint := flags.String("csi-endpoint", "", "the driver's socket, for all services: a path, or unix:///path")
	flags.Int64Var(&opts.Size, "size", 1<<30, "bytes of a volume; twice that where it can grow")
	flags.StringToStringVar(&opts.Parameters, "parameter", nil, "KEY=VALUE of CreateVolume, as of a StorageClass; may be repeated")
	flags.StringVar(&opts.Dir, "dir", "/var/tmp", "where volumes are published")
	flags.StringVar(&opts.FSType, "fs", "ext4", "the volumes' filesystem, if they are not raw block")
	err := flags.Parse(args)
	if errors.Is(err, pflag.ErrHelp) {
		_, _ = fmt.Fprintf(stdout, help+flags.FlagUsages(), word, suites()[word].about)
		return 0
	}
	path := strings.TrimPrefix(*endpoint, "unix://")
	switch {
	case err != nil:
	case flags.NArg() > 0:
		err = fmt.Errorf("%q is not expected", flags.Arg(0))
	case !strings.HasPrefix(path, "/"):
		err = errors.New("--csi-endpoint: give the absolute path of a socket, or unix:///path")
	case opts.Size < leastSize:
		err = fmt.Errorf("--size: give at least %d", leastSize)
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "crust-conformance %[1]s: %[2]v\nSee 'crust-conformance %[1]s --help'.\n", word, err)
		return 2
	}
	if err := suites()[word].print(ctx, path, opts, stdout); err != nil {
		_, _ = fmt.Fprintf(stderr, "crust-conformance %s: %v\n", word, err)
		return 1
	}
	return 0
}

// leastSize has room for what is written, each block apart from the others.
const leastSize = 64 * block

func (s suite) print(ctx context.Context, socket string, opts Options, out io.Writer) error {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	table := &printer.Printer{Out: out, Format: printer.FormatTable}
	return conformance.Print(table, "the driver", func(onResult func(conformance.Result)) (conformance.Report, error) {
		return s.run(ctx, conn, opts, onResult)
	})
}
