package monitoring

// schemaVersion is Grafana 12's; older ones take it too.
const schemaVersion = 41

// theDashboard puts the rows together.
func theDashboard() dashboard {
	return dashboard{
		UID: "crust-proxy", Title: "crust-proxy", Tags: []string{"storage", "csi", "crust-proxy"},
		Description: "Deferred volumes: what the nodes have, what was refused, and how quickly sandboxes and CSI drivers answer.",
		Timezone:    "browser", Editable: true, GraphTooltip: 1, Refresh: "1m", SchemaVersion: schemaVersion,
		Time:       timeRange{From: "now-6h", To: "now"},
		Templating: templating{List: variables()},
		Links:      []link{{Title: "Runbooks", Type: "link", URL: runbooks, Tags: []string{}, TargetBlank: true}},
		Panels:     placed(rows()),
	}
}

func variables() []variable {
	const instances = `label_values(crust_proxy_build_info, instance)`
	return []variable{
		{Name: "datasource", Label: "Data source", Type: "datasource", Query: "prometheus"},
		{
			Name: "instance", Label: "Node", Type: "query", Query: variableQuery{Query: instances, RefID: "instance"},
			Definition: instances, Datasource: &prometheusSource, IncludeAll: true, AllValue: ".*", Multi: true, Refresh: 2, Sort: 1,
		},
	}
}

// placed gives each panel its number and its place.
func placed(all []row) []panel {
	var out []panel
	y := 0
	for _, r := range all {
		open := false
		out = append(out, panel{ID: len(out) + 1, Type: "row", Title: r.title, Collapsed: &open, Panels: []panel{}, GridPos: gridPos{H: 1, W: grid, Y: y}})
		y++
		x := 0
		for _, s := range r.panels {
			if x+s.width > grid {
				x, y = 0, y+r.height
			}
			made := s.panel()
			made.ID, made.GridPos = len(out)+1, gridPos{H: r.height, W: s.width, X: x, Y: y}
			out = append(out, made)
			x += s.width
		}
		y += r.height
	}
	return out
}

func (s shown) panel() panel {
	out := panel{
		Type: s.kind, Title: s.title, Description: s.help, Datasource: &prometheusSource,
		FieldConfig: &fieldConfig{Defaults: s.defaults(), Overrides: []any{}}, Options: s.options(),
	}
	for i, q := range s.queries {
		now := s.kind != "timeseries"
		made := target{
			RefID: string(rune('A' + i)), Datasource: prometheusSource, Expr: selected(q.expr), LegendFormat: q.legend, Instant: now, Range: !now,
		}
		if s.kind == "table" {
			made.Format = "table"
		}
		out.Targets = append(out.Targets, made)
	}
	return out
}

func (s shown) defaults() fieldDefaults {
	zero, first := 0.0, 1.0
	out := fieldDefaults{Unit: s.unit}
	switch s.kind {
	case "stat":
		out.NoValue, out.Color = "0", &color{Mode: "thresholds"}
		out.Thresholds = &thresholds{Mode: "absolute", Steps: []step{{Color: "green"}}}
		if s.alarm {
			out.Thresholds.Steps = append(out.Thresholds.Steps, step{Color: "red", Value: &first})
		}
	case "timeseries":
		out.Min, out.Color = &zero, &color{Mode: "palette-classic"}
		out.Custom = map[string]any{"fillOpacity": 10, "showPoints": "never"}
	}
	return out
}

func (s shown) options() any {
	switch s.kind {
	case "stat":
		return map[string]any{"colorMode": "value", "graphMode": "none", "reduceOptions": map[string]any{"calcs": []string{"lastNotNull"}}}
	case "timeseries":
		return map[string]any{
			"legend":  map[string]any{"displayMode": "list", "placement": "bottom", "showLegend": true},
			"tooltip": map[string]any{"mode": "multi", "sort": "desc"},
		}
	}
	return map[string]any{}
}
