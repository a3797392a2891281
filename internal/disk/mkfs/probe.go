package mkfs

import (
	"context"
	"os"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// How blkid ends.
const (
	blkidFound      = 0
	blkidNothing    = 2
	blkidAmbivalent = 8
)

// probe is blkid's word.
type probe struct {
	tags       map[string]string
	ambivalent bool
}

func (p probe) nothing() bool { return len(p.tags) == 0 && !p.ambivalent }

func (p probe) words() []string {
	var out []string
	if p.ambivalent {
		out = append(out, "the signatures of more than one thing")
	}
	if t := p.tags["TYPE"]; t != "" {
		out = append(out, t)
	}
	if t := p.tags["PTTYPE"]; t != "" {
		out = append(out, "a partition table ("+t+")")
	}
	if len(out) == 0 && len(p.tags) > 0 {
		out = append(out, "something that blkid knows but does not name")
	}
	return out
}

// blkid asks it for everything that it knows of, past its cache.
func (d *device) blkid(ctx context.Context) (probe, error) {
	program, err := d.f.tool("blkid")
	if err != nil {
		return probe{}, d.errorf(volume.KindOf(err), "cannot be looked at: %w", err)
	}
	ran, err := program.run(ctx, d.box(), []*os.File{d.file}, "-p", "-o", "export", childDevice)
	if err != nil {
		if ctx.Err() != nil {
			return probe{}, d.gone(ctx.Err())
		}
		return probe{}, d.errorf(volume.Internal, "blkid could not be run: %w", err)
	}
	found, ok := parseProbe(ran)
	if !ok {
		return probe{}, d.errorf(volume.Internal, "blkid cannot tell what is on it (%s): %s", ran.how(), ran.text())
	}
	return found, nil
}

// parseProbe takes an answer only where its parts agree: an exit code that says
// "nothing" beside a complaint, or beside a finding, is no answer.
func parseProbe(r *result) (probe, bool) {
	if r.signal != 0 || r.stderr != "" && r.code != blkidAmbivalent {
		return probe{}, false
	}
	tags := make(map[string]string)
	for line := range strings.SplitSeq(r.stdout, "\n") {
		if line == "" {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || !nameForm().MatchString(key) {
			return probe{}, false
		}
		// DEVNAME only repeats the question.
		if key != "DEVNAME" {
			tags[key] = value
		}
	}
	switch r.code {
	case blkidFound:
		return probe{tags: tags}, len(tags) > 0
	case blkidNothing:
		return probe{}, len(tags) == 0
	case blkidAmbivalent:
		return probe{tags: tags, ambivalent: true}, true
	default:
		return probe{}, false
	}
}

// nameForm is the form of a filesystem type, and of a key of blkid's answer.
var nameForm = sys.LazyRegexp(`^[A-Za-z0-9_.-]{1,64}$`)
