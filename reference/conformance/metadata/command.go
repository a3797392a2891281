package metadata

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/reference/conformance"
)

// Command is the word of crust-conformance for this suite.
const Command = "snapshot-metadata"

const help = `Try the SnapshotMetadata service of a CSI driver, on volumes and snapshots that are
made and removed by the driver's own calls. Volumes are used as raw block. Run it
as root in the mount namespace of the driver.

Usage:
  crust-conformance snapshot-metadata --csi-endpoint SOCKET [flags]

Exit codes: 0 all demands are met, 1 one is not or the run failed, 2 wrong usage.

Flags:
`

// Main runs the command and gives its exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	var opts Options
	flags := pflag.NewFlagSet(Command, pflag.ContinueOnError)
	flags.Usage = func() {}
	endpoint := flags.String("csi-endpoint", "", "the driver's socket, for all services: a path, or unix:///path")
	flags.Int64Var(&opts.Size, "size", 1<<30, "bytes of a volume; twice that where it can grow")
	flags.StringToStringVar(&opts.Parameters, "parameter", nil, "KEY=VALUE of CreateVolume, as of a StorageClass; may be repeated")
	flags.StringVar(&opts.Dir, "dir", "/var/tmp", "where volumes are published")
	err := flags.Parse(args)
	if errors.Is(err, pflag.ErrHelp) {
		_, _ = fmt.Fprint(stdout, help+flags.FlagUsages())
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
		_, _ = fmt.Fprintf(stderr, "crust-conformance %[1]s: %[2]v\nSee 'crust-conformance %[1]s --help'.\n", Command, err)
		return 2
	}
	if err := run(ctx, path, opts, stdout); err != nil {
		_, _ = fmt.Fprintf(stderr, "crust-conformance %s: %v\n", Command, err)
		return 1
	}
	return 0
}

// leastSize has room for what is written, each block apart from the others.
const leastSize = 64 * block

func run(ctx context.Context, socket string, opts Options, out io.Writer) error {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	report, err := Run(ctx, conn, opts, func(r conformance.Result) {
		_, _ = fmt.Fprintf(out, "%s %-14s %s\n", r.Status, r.Name, r.Demand)
		if r.Seen != "" {
			_, _ = fmt.Fprintf(out, "     %-14s seen: %s\n", "", r.Seen)
		}
	})
	failed := report.Count(conformance.Fail)
	_, _ = fmt.Fprintf(out, "\n%d passed, %d failed, %d skipped\n", report.Count(conformance.Pass), failed, report.Count(conformance.Skip))
	if failed > 0 {
		err = errors.Join(err, fmt.Errorf("the driver does not meet %d of %d demands", failed, len(report.Results)))
	}
	return err
}
