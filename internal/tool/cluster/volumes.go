package cluster

import (
	"net/url"
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// filter selects volumes: the daemons do, except by namespace.
type filter struct{ driver, state, namespace string }

func (f filter) query() url.Values {
	query := url.Values{}
	for key, value := range map[string]string{"driver": f.driver, "state": f.state} {
		if value != "" {
			query.Set(key, value)
		}
	}
	return query
}

func (t *tool) printVolumes(states []*state, f filter) error {
	type nodeVolumes struct {
		Node    string           `json:"node"`
		Error   string           `json:"error,omitempty"`
		Volumes []printer.Object `json:"volumes"`
	}
	documents := make([]nodeVolumes, len(states))
	for i, s := range states {
		s.volumes = slices.DeleteFunc(s.volumes, func(v *adminv1.Volume) bool { return f.namespace != "" && v.GetPodNamespace() != f.namespace })
		documents[i] = nodeVolumes{Node: s.node, Volumes: printer.Objects(s.volumes)}
		if s.err != nil {
			documents[i].Error = s.err.Error()
		}
	}
	return t.out.Result(map[string]any{"nodes": documents}, func() error {
		table := printer.NewTable("NODE", "STATE", "POD", "VOLUME", "DRIVER", "HANDLER", "USED", "SIZE", "AGE", "+ID", "+DEVICE", "+PROBLEM", "+TARGET")
		for _, s := range states {
			for _, v := range s.volumes {
				table.Add(t.volumeRow(s.node, v)...)
			}
			if s.err != nil {
				table.Add(printer.Text(s.node), printer.Painted(show.Red, "no answer: "+s.err.Error()))
			}
		}
		return t.out.Table(table)
	})
}

func (t *tool) volumeRow(node string, v *adminv1.Volume) []printer.Cell {
	text, used, size, at := printer.Text, "", "", v.GetCreatedAt()
	if u := show.Usage(v, adminv1.VolumeUsage_UNIT_BYTES); u != nil {
		used, size = show.Size(u.GetUsed()), show.Size(u.GetTotal())
	}
	return []printer.Cell{
		text(node), printer.Painted(show.StateColour(v.GetState()), show.StateName(v.GetState())), text(show.Pod(v)), text(show.VolumeName(v)),
		text(v.GetDriver()), text(v.GetHandler()), text(used), text(size), text(show.When(at != nil, show.Duration(t.now().Sub(at.AsTime())))),
		text(show.ShortID(v.GetId())), text(v.GetDevice()), text(v.GetLastError()), text(v.GetTargetPath()),
	}
}
