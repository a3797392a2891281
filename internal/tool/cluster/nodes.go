package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// state is what one node answered. If Err is set, it is not known.
type state struct {
	place
	err      error
	view     *adminv1.NodeView
	volumes  []*adminv1.Volume // only where they were asked for
	findings []doctor.Finding  // of the daemon's own reports, without those that are ok
}

// ask asks all places, some at a time and each for a bounded time, and returns their states in the same order.
func (a *access) ask(ctx context.Context, all []place, question func(context.Context, *state) error) []*state {
	states := make([]*state, len(all))
	sys.Each(askedAtOnce, slices.All(all), func(i int, at place) {
		states[i] = &state{place: at}
		if at.why != "" {
			states[i].err = errors.New(at.why)
			return
		}
		ctx, cancel := context.WithTimeout(ctx, a.patience)
		defer cancel()
		states[i].err = question(ctx, states[i])
	})
	return states
}

// read decodes an answer. A newer daemon may say more than we know of.
func (s *state) read(ctx context.Context, path string, into proto.Message) error {
	raw, err := s.get(ctx, path)
	own, _ := errors.AsType[*apierrors.StatusError](err)
	switch {
	case apierrors.IsNotFound(err) && own.ErrStatus.Details != nil && own.ErrStatus.Details.Kind != "": // not the daemon's answer
		return fmt.Errorf("it has gone meanwhile: %w", err)
	case apierrors.IsNotFound(err) || err != nil && strings.HasSuffix(err.Error(), "404 Not Found"):
		return errors.New("there is no view of it: http.view is off, its version is older, or that is no crust-proxy")
	case apierrors.IsForbidden(err):
		return fmt.Errorf("you may not ask it: %w", err)
	case err != nil:
		return err
	}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, into); err != nil {
		return errors.New("what answers there is no crust-proxy")
	}
	return nil
}

func askNode(ctx context.Context, s *state) error {
	s.view = &adminv1.NodeView{}
	if err := s.read(ctx, "/v1/node", s.view); err != nil {
		return err
	}
	s.node = cmp.Or(s.node, s.view.GetNode().GetNodeName())
	s.examine(ctx)
	return nil
}

func askAll(ctx context.Context, s *state) error {
	if err := askNode(ctx, s); err != nil {
		return err
	}
	err := s.askVolumes(ctx, url.Values{})
	s.examine(ctx)
	return err
}

func (s *state) askVolumes(ctx context.Context, query url.Values) error {
	for size := 0; ; {
		page := &adminv1.ListVolumesResponse{}
		if err := s.read(ctx, "/v1/volumes?"+query.Encode(), page); err != nil {
			return err
		}
		if size += proto.Size(page); size > mostAnswer {
			return fmt.Errorf("its volumes have more than %d bytes", mostAnswer)
		}
		s.volumes = append(s.volumes, page.GetVolumes()...)
		token := page.GetNextPageToken()
		if token == "" || token == query.Get("page_token") {
			return nil
		}
		query.Set("page_token", token)
	}
}

func (s *state) examine(ctx context.Context) {
	service := doctor.Service{}
	if s.pod != nil {
		service = doctor.Service{InPod: true, Namespace: s.pod.Metadata.Namespace, Pod: s.pod.Metadata.Name}
	}
	report := doctor.Reported(ctx, service, doctor.Daemon{
		Node: s.view.GetNode(), Handlers: s.view.GetHandlers().GetHandlers(), Drivers: s.view.GetDrivers().GetDrivers(), Volumes: s.volumes,
	})
	s.findings = slices.DeleteFunc(report.Findings, func(f doctor.Finding) bool { return f.Severity == doctor.OK })
}

func (s *state) count(severity doctor.Severity) int {
	return doctor.Report{Findings: s.findings}.Count(severity)
}

// bad reports whether the node has an error, or is not known.
func (s *state) bad() bool {
	n, bad := s.view.GetNode(), func(v *adminv1.Volume) bool {
		return v.GetState() == adminv1.VolumeState_VOLUME_STATE_DEGRADED || v.GetReleasedByForce()
	}
	return s.err != nil || s.count(doctor.Error) > 0 || n.GetVolumesByState()["degraded"]+n.GetVolumesReleasedByForce() > 0 || slices.ContainsFunc(s.volumes, bad)
}

// document is what a program reads of a node.
type document struct {
	Name     string           `json:"name"`
	Pod      string           `json:"pod,omitempty"`
	Error    string           `json:"error,omitempty"`
	View     *printer.Object  `json:"view,omitempty"`
	Findings []doctor.Finding `json:"findings"`
}

func (s *state) document() document {
	d := document{Name: s.node, Findings: append([]doctor.Finding{}, s.findings...)}
	if s.pod != nil {
		d.Pod = s.pod.Metadata.Namespace + "/" + s.pod.Metadata.Name
	}
	if s.err != nil {
		d.Error = s.err.Error()
		return d
	}
	d.View = &printer.Object{Message: s.view}
	return d
}

func (t *tool) printNodes(states []*state) error {
	documents := make([]document, len(states))
	for i, s := range states {
		documents[i] = s.document()
	}
	return t.out.Result(map[string]any{"nodes": documents}, func() error {
		table := printer.NewTable("NODE", "VERSION", "VOLUMES", "BOUND", "DEGRADED", "REFUSED", "HELD", "DRIVERS", "FINDINGS", "CONFIG",
			"+DIGEST", "+PROOF", "+AGE", "+POD")
		for i, s := range states {
			table.Add(t.row(s, documents[i].Pod)...)
		}
		return t.out.Table(table)
	})
}

func (t *tool) row(s *state, pod string) []printer.Cell {
	text := printer.Text
	if s.err != nil {
		row := append([]printer.Cell{text(s.node)}, slices.Repeat([]printer.Cell{text("")}, 8)...)
		return append(row, printer.Painted(show.Red, "no answer: "+s.err.Error()))
	}
	n, sum := s.view.GetNode(), int64(0)
	for _, count := range n.GetVolumesByState() {
		sum += count
	}
	number := func(name, colour string) printer.Cell {
		count := n.GetVolumesByState()[name]
		return printer.Painted(show.When(count > 0, colour), strconv.FormatInt(count, 10))
	}
	bad := n.GetConfigBadSince()
	config := show.Either(bad != nil, printer.Painted(show.Red, "bad for "+show.Duration(t.now().Sub(bad.AsTime()))), text("ok"))
	return []printer.Cell{
		text(s.node), text(n.GetVersion()), text(strconv.FormatInt(sum, 10)), number("bound", show.Plain), number("degraded", show.Red),
		number("refused", show.Red), number("held", show.Red), text(s.drivers()), s.findingsCell(), config,
		text(show.ShortID(n.GetConfigDigest())), text(n.GetProof()), text(show.Duration(t.now().Sub(n.GetStartedAt().AsTime()))), text(pod),
	}
}

// drivers are those that are ready, of all; empty if the front is off.
func (s *state) drivers() string {
	if !s.view.GetDrivers().GetFrontEnabled() {
		return ""
	}
	all := s.view.GetDrivers().GetDrivers()
	ready := slices.DeleteFunc(slices.Clone(all), func(d *adminv1.Driver) bool { return !d.GetReady() || d.GetProblem() != "" })
	return fmt.Sprintf("%d/%d", len(ready), len(all))
}

func (s *state) findingsCell() printer.Cell {
	failed, other := s.count(doctor.Error), s.count(doctor.Warn)+s.count(doctor.Wait)
	switch {
	case failed > 0:
		return printer.Painted(show.Red, fmt.Sprintf("%d error, %d warn", failed, other))
	case other > 0:
		return printer.Painted(show.Yellow, fmt.Sprintf("%d warn", other))
	}
	return printer.Text("0")
}
